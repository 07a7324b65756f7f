// The library, and the operators that belong to no family. Families register theirs in
// x_operator.cpp.
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "core/instruction_set.h"
#include "dispatcher/build_facts.h"
#include "dispatcher/checks.h"
#include "dispatcher/device_errors.h"
#include "posembed/build_info.h"
#include "posembed/mapped_memory.h"
#include "posembed/memory.h"

namespace posembed::dispatcher {
namespace {

/// JSON of BuildInfo.
std::string build_info_text() {
  const BuildInfo info = build_info();
  return nlohmann::ordered_json{{"version", info.version},
                                {"torch_version", info.torch_version},
                                {"cuda_version", info.cuda_version},
                                {"cuda_architectures", info.cuda_architectures},
                                {"compiler", info.compiler},
                                {"instruction_sets", info.instruction_sets},
                                {"instruction_set", info.instruction_set}}
      .dump();
}

}  // namespace
}  // namespace posembed::dispatcher

TORCH_LIBRARY(posembed, m) {
  using posembed::dispatcher::define;
  define(m, "check_errors(bool wait=True) -> ()");
  define(m, "build_info() -> str");
  define(m, "empty_cache() -> int");
  define(m, "set_cache_limit(int bytes) -> int");
  define(m, "prefer_huge_pages(Tensor table) -> ()");
  define(m, "mapped(Tensor table, Device device) -> Tensor");
}

TORCH_LIBRARY_IMPL(posembed, CompositeExplicitAutograd, m) {
  m.impl("check_errors", posembed::dispatcher::check_errors);
  m.impl("build_info", posembed::dispatcher::build_info_text);
  m.impl("empty_cache", posembed::empty_cache);
  m.impl("set_cache_limit", posembed::set_cache_limit);
  m.impl("prefer_huge_pages", posembed::prefer_huge_pages);
  m.impl("mapped", posembed::mapped);
}

namespace posembed::dispatcher {
namespace {

// --------------------------------------------------------------------------------------- math bits

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
  if (use == Use::written) check_holds_numbers(tensor, argument.name().c_str());
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

namespace posembed {
namespace {

// -------------------------------------------------------------------------------------- build info

std::vector<std::string> split(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

}  // namespace

BuildInfo build_info() {
  BuildInfo info;
  info.version = POSEMBED_VERSION;
  info.torch_version = POSEMBED_TORCH_VERSION;
  info.cuda_version = POSEMBED_CUDA_VERSION;
  info.cuda_architectures = split(POSEMBED_CUDA_ARCHITECTURES);
  info.compiler = POSEMBED_COMPILER;
  for (const auto set : core::built_instruction_sets()) {
    info.instruction_sets.emplace_back(core::name(set));
  }
  info.instruction_set = core::name(core::instruction_set());
  return info;
}

}  // namespace posembed
