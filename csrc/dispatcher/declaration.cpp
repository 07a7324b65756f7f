#include <algorithm>

#include "dispatcher/checks.h"
#include "dispatcher/operator.h"

namespace posembed::dispatcher {
namespace {

/// The function that keeps gradients, for an operator that writes: rotary for
/// posembed::rotary_pair_ and posembed::rotary_pair_out.
std::string without_suffixes(std::string name) {
  name = name.substr(name.rfind(':') + 1);
  for (const std::string suffix : {"_out", "_", "_pair"}) {
    const size_t kept = name.size() - std::min(name.size(), suffix.size());
    if (name.compare(kept, suffix.size(), suffix) == 0) name.resize(kept);
  }
  return name;
}

}  // namespace

Declaration::Declaration(const char* name)
    : operator_(c10::Dispatcher::singleton().findSchemaOrThrow(
          (std::string("posembed::") + name).c_str(), "")) {
  const auto& arguments = operator_.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::AliasInfo* const alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite()) written_ |= uint64_t{1} << i;
  }
}

void Declaration::check_names(std::string_view expressions, size_t first) const {
  const auto& arguments = operator_.schema().arguments();
  for (size_t i = first; !expressions.empty(); ++i) {
    const size_t end = std::min(expressions.find(','), expressions.size());
    std::string_view name = expressions.substr(0, end);
    expressions.remove_prefix(std::min(end + 1, expressions.size()));
    name.remove_prefix(name.rfind('.') + 1);
    name = name.substr(0, name.find('('));  // of an accessor
    TORCH_INTERNAL_ASSERT(i < arguments.size() && arguments[i].name() == name, operator_.schema(),
                          ": argument ", i, " is not '", std::string(name), "'");
  }
}

void Declaration::raise_missing(size_t argument) const {
  C10_THROW_ERROR(TypeError, std::string(name_of(argument)) + ": expected a Tensor, got none");
}

void Declaration::raise_devices(const at::Tensor& first, size_t first_argument,
                                const at::Tensor& other, size_t other_argument) const {
  TORCH_CHECK_VALUE(false, name_of(other_argument), ": expected the device of ",
                    name_of(first_argument), ", ", first.device(), ", got ", other.device());
}

void Declaration::raise_history(const at::Tensor& tensor, size_t argument) const {
  check_inference_only(tensor, name_of(argument),
                       without_suffixes(operator_.schema().name()).c_str());
  TORCH_INTERNAL_ASSERT(false, "a tensor without history was refused");
}

}  // namespace posembed::dispatcher
