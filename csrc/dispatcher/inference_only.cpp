#include "dispatcher/inference_only.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

#include <vector>

namespace posembed::dispatcher {
namespace {

std::string without_suffix(std::string name) {
  for (const std::string suffix : {"_out", "_"}) {
    const size_t kept = name.size() - suffix.size();
    if (name.compare(kept, suffix.size(), suffix) == 0) return name.substr(0, kept);
  }
  return name;
}

}  // namespace

void check_inference_only(const at::Tensor& tensor, const std::string& argument,
                          const std::string& alternative) {
  TORCH_CHECK_VALUE(!(at::GradMode::is_enabled() && tensor.requires_grad()), argument,
                    ": requires grad, and an in-place operator keeps no history; use ", alternative,
                    " or torch.no_grad()");
  TORCH_CHECK_VALUE(!tensor._fw_grad(/*level=*/0).defined(), argument,
                    ": has a forward-mode tangent, which an in-place operator would not change; ",
                    "use ", alternative);
}

void inference_only(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::vector<c10::Argument>& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  std::vector<at::Tensor> written;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!values[i].isTensor()) continue;
    const at::Tensor& tensor = values[i].toTensor();
    check_inference_only(tensor, arguments[i].name(), without_suffix(op.schema().name()));
    const c10::AliasInfo* const alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite()) written.push_back(tensor);
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
  }
  for (const at::Tensor& tensor : written) torch::autograd::impl::bump_version(tensor);
}

}  // namespace posembed::dispatcher
