// The library, and the operators that belong to no family. Families register theirs in
// x_operator.cpp.
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/cuda_launch.h"
#include "core/device.h"
#include "core/instruction_set.h"
#include "dispatcher/build_facts.h"
#include "dispatcher/launch.h"
#include "dispatcher/operator.h"
#include "posembed/build_info.h"
#include "posembed/errors.h"
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

// ------------------------------------------------------------------------------------ declarations

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

// ----------------------------------------------------------------------------------- device errors

namespace {

/// A device without an index counts as device 0.
int number_of(c10::DeviceIndex device) { return std::max<int>(device, 0); }

}  // namespace

core::DeviceError* device_error(c10::Device device) {
  if (!core::built_with_cuda || !on_cuda(device)) return nullptr;
  const int number = number_of(device.index());
  if (core::DeviceError* known = core::known_error_record(number)) return known;
  const c10::DeviceGuard guard(device);  // otherwise the driver would start on the current one
  core::DeviceError* record = core::error_record(number);
  TORCH_CHECK(record != nullptr,
              "posembed: ", core::cuda_failure("CUDA gave no pinned memory for errors of kernels"));
  return record;
}

void mark_device_used(c10::DeviceIndex device) {
  const int number = number_of(device);
  if (core::is_device_used(number)) return;
  const std::string failure = core::cuda_failure("");
  TORCH_CHECK(failure.empty(), "posembed: ", failure);
  core::mark_device_used(number);
}

void raise_device_error() {
  const std::string text = core::take_device_error();
  TORCH_CHECK_INDEX(text.empty(), text);
}

void check_errors(bool wait) {
  for (int device = 0; wait && device < core::devices_end(); ++device) {
    if (core::is_device_used(device)) wait_for_device(device);
  }
  raise_device_error();
}

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

void check_errors(bool wait) { dispatcher::check_errors(wait); }

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
