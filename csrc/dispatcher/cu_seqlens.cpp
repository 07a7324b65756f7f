#include "dispatcher/cu_seqlens.h"

#include <c10/util/Exception.h>

#include "dispatcher/checks.h"
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

}  // namespace posembed::dispatcher
