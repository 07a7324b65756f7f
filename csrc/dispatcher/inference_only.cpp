#include "dispatcher/inference_only.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

namespace posembed::dispatcher {

void check_inference_only(const at::Tensor& tensor, const char* argument, const char* alternative) {
  if (!has_history(tensor)) return;
  TORCH_CHECK_VALUE(!(at::GradMode::is_enabled() && tensor.requires_grad()), argument,
                    ": requires grad, and an in-place operator keeps no history; use ", alternative,
                    " or torch.no_grad()");
  TORCH_CHECK_VALUE(false, argument,
                    ": has a forward-mode tangent, which an in-place operator would not change; ",
                    "use ", alternative);
}

void check_versioned(const at::Tensor& tensor, const char* argument) {
  TORCH_CHECK_VALUE(!tensor.is_inference() || c10::InferenceMode::is_enabled(), argument,
                    ": is a tensor of inference mode, which only inference mode may write");
}

}  // namespace posembed::dispatcher
