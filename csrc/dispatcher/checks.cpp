#include "dispatcher/checks.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include "dispatcher/cuda_scope.h"
#include "dispatcher/tensors.h"

namespace posembed::dispatcher {

void check_boundaries(const at::Tensor& cu_seqlens) {
  check_integers(cu_seqlens, "cu_seqlens");
  TORCH_CHECK_VALUE(cu_seqlens.dim() == 1 && cu_seqlens.sym_size(0) >= 1,
                    "cu_seqlens: expected [documents + 1], got ", cu_seqlens.sym_sizes());
}

void check_cu_seqlens(const at::Tensor& cu_seqlens, int64_t total, const char* total_name) {
  const int64_t last = cu_seqlens.numel() - 1;
  if (on_cuda(cu_seqlens)) return;
  const core::IndexView view = index_view(cu_seqlens);
  TORCH_CHECK_VALUE(core::read(view, 0) == 0, "cu_seqlens: expected 0 first, got ",
                    core::read(view, 0));
  for (int64_t index = 1; index <= last; ++index) {
    const int64_t before = core::read(view, index - 1), here = core::read(view, index);
    TORCH_CHECK_VALUE(before <= here, "cu_seqlens: expected numbers that do not decrease, got ",
                      before, " and ", here, " at index ", index);
  }
  TORCH_CHECK_VALUE(core::read(view, last) == total, "cu_seqlens: expected ", total_name, ", ",
                    total, ", last, got ", core::read(view, last));
}

// ---------------------------------------------------------------------------------- inference only

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
