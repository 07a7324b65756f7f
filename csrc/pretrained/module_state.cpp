// load_state: fills a module's parameters and buffers from a file, by name.
#include <torch/nn/module.h>

#include <sstream>
#include <unordered_set>

#include "core/brief.h"
#include "dispatcher/tensors.h"
#include "posembed/pretrained.h"
#include "pretrained/bad_file.h"

namespace posembed::pretrained {
namespace {

/// A parameter or buffer, and its name in the file.
struct Target {
  std::string name;
  torch::Tensor tensor;
};

std::vector<Target> targets_of(const torch::nn::Module& module, const LoadOptions& options) {
  std::vector<Target> targets;
  const auto add = [&](const std::string& name, const torch::Tensor& tensor) {
    targets.push_back({options.name_in_file() ? options.name_in_file()(name) : name, tensor});
  };
  for (const auto& parameter : module.named_parameters()) add(parameter.key(), parameter.value());
  for (const auto& buffer : module.named_buffers()) add(buffer.key(), buffer.value());
  return targets;
}

/// Numbers are converted among floats and among integers of more than a byte; codes never.
bool converts(torch::Dtype from, torch::Dtype to) {
  const auto is_number = [](torch::Dtype type) {
    return c10::elementSize(type) > 1 && !c10::isComplexType(type);
  };
  return from == to ||
         (is_number(from) && is_number(to) && c10::isFloatingType(from) == c10::isFloatingType(to));
}

void check_kind(const Target& target, const VectorFile& file) {
  const torch::Dtype from = file.dtype(target.name), to = target.tensor.scalar_type();
  TORCH_CHECK_TYPE(converts(from, to), target.name, ": expected ", dispatcher::dtype_name(to),
                   ", got ", dispatcher::dtype_name(from), " in ", readable(file.path()),
                   ", which are not converted");
}

/// The first few names, for a message.
std::string some_of(const std::vector<std::string>& names) {
  constexpr size_t shown = 5;
  std::ostringstream text;
  for (size_t i = 0; i < names.size() && i < shown; ++i) {
    text << (i == 0 ? "" : ", ") << in_quotes(names[i]);
  }
  if (names.size() > shown) text << " and " << names.size() - shown << " more";
  return text.str();
}

void check_all_match(const Unmatched& unmatched, const std::string& path) {
  TORCH_CHECK_VALUE(unmatched.missing.empty(), "module: ", readable(path), " has no ",
                    some_of(unmatched.missing), "; strict(false) leaves them as they are");
  TORCH_CHECK_VALUE(unmatched.unexpected.empty(), "module: has no parameter or buffer for ",
                    some_of(unmatched.unexpected), " of ", readable(path),
                    "; strict(false) leaves them out");
}

}  // namespace

Unmatched load_state(torch::nn::Module& module, const VectorFile& file,
                     const LoadOptions& options) {
  const std::vector<std::string> names = file.names();
  const std::unordered_set<std::string> known(names.begin(), names.end());
  std::unordered_set<std::string> read;
  std::vector<Target> found;
  Unmatched unmatched;
  for (Target& target : targets_of(module, options)) {
    if (known.count(target.name) == 0) {
      unmatched.missing.push_back(target.name);
      continue;
    }
    const std::vector<int64_t> shape = file.shape(target.name);
    TORCH_CHECK_VALUE(target.tensor.sizes() == shape, target.name, ": expected ",
                      target.tensor.sizes(), ", got ", torch::IntArrayRef(shape), " in ",
                      readable(file.path()));
    check_kind(target, file);
    read.insert(target.name);
    found.push_back(std::move(target));
  }
  for (const std::string& name : names) {
    if (read.count(name) == 0) unmatched.unexpected.push_back(name);
  }
  if (options.strict()) check_all_match(unmatched, file.path());
  TORCH_CHECK_VALUE(!found.empty() || unmatched.missing.empty() || names.empty(),
                    "module: ", readable(file.path()), " has none of its names, such as ",
                    some_of(unmatched.missing), ", but ", some_of(unmatched.unexpected),
                    "; name_in_file() says how a name is written there");
  const torch::NoGradGuard no_grad;
  for (Target& target : found) {
    target.tensor.copy_(file.tensor(target.name, target.tensor.scalar_type()));
  }
  return unmatched;
}

}  // namespace posembed::pretrained
