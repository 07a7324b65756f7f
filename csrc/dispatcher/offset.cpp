#include "posembed/offset.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>

#include <algorithm>

#include "dispatcher/checks.h"

namespace posembed {

std::optional<at::Tensor> Offset::positions(const std::optional<at::Tensor>& given,
                                            const at::Tensor& x, int64_t batch, int64_t seq) const {
  if (!of_samples_.has_value() || x.dim() <= std::max(batch, seq)) return given;
  TORCH_CHECK_VALUE(!given.has_value(), "offset: expected 0 where positions are given, got ",
                    of_samples_->sizes());
  dispatcher::check_integers(*of_samples_, "offset");
  TORCH_CHECK_VALUE(batch >= 0, "offset: expected a number where there is no batch, got ",
                    of_samples_->sizes());
  TORCH_CHECK_VALUE(of_samples_->dim() == 1 && of_samples_->size(0) == x.size(batch),
                    "offset: expected a number or [batch] with batch ", x.size(batch), ", got ",
                    of_samples_->sizes());
  return of_samples_->unsqueeze(-1) + at::arange(x.size(seq), of_samples_->options());
}

}  // namespace posembed
