#include "dispatcher/math_bits.h"

#include <ATen/core/LegacyTypeDispatch.h>

namespace posembed::dispatcher {
namespace {

/// What may be done with a tensor that has one of the bits.
enum class Use { read, returned, written };

Use use_of(const c10::Argument& argument) {
  if (argument.alias_info() == nullptr) return Use::read;
  return argument.alias_info()->isWrite() ? Use::written : Use::returned;
}

void resolve(const c10::Argument& argument, c10::IValue* value) {
  if (!value->isTensor()) return;
  const at::Tensor& tensor = value->toTensor();
  if (!tensor.defined() || !(tensor.is_conj() || tensor.is_neg())) return;
  const Use use = use_of(argument);
  const char* resolved = tensor.is_neg() ? "resolve_neg()" : "resolve_conj()";
  TORCH_CHECK_VALUE(use != Use::written, argument.name(),
                    ": expected memory that holds its numbers, which are written in place, got a ",
                    "view that negates or conjugates them; use ", argument.name(), ".", resolved);
  if (use == Use::returned) return;  // its views keep the bits
  const at::AutoDispatchBelowADInplaceOrView guard;
  *value = tensor.resolve_conj().resolve_neg();
}

/// The kernel of every operator for both keys.
void resolve_arguments(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                       torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) resolve(arguments[i], &(*stack)[first + i]);
  // Conjugate comes after Negative.
  const c10::DispatchKeySet later(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Conjugate);
  op.redispatchBoxed(keys & later, stack);
}

}  // namespace

void define_math_bits(torch::Library& library, const std::string& schema) {
  const std::string name = schema.substr(0, schema.find('('));
  for (const auto key : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative}) {
    library.impl(
        name.c_str(),
        torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<resolve_arguments>()));
  }
}

}  // namespace posembed::dispatcher
