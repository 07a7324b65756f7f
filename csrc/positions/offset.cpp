#include "posembed/offset.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>

#include <algorithm>

#include "dispatcher/checks.h"
#include "positions/operator.h"

namespace posembed {

namespace {

/// Positions [tokens] that restart at each document's offset. A sequence is the whole batch.
at::Tensor positions_of_documents(const at::Tensor& cu_seqlens, const Offset& offset,
                                  const at::Tensor& x, int64_t batch, int64_t seq) {
  TORCH_CHECK_VALUE(batch < 0 || x.sym_size(batch) == 1, "cu_seqlens: expected ",
                    x.dim() > 3 ? "layout 'thd' or " : "", "batch 1, got batch ",
                    x.sym_size(std::max<int64_t>(batch, 0)));
  const at::Tensor positions =
      positions::packed_positions(cu_seqlens, x.sym_size(seq), offset.of_samples());
  return offset.of_samples().has_value() ? positions : positions + at::Scalar(offset.number());
}

}  // namespace

std::optional<at::Tensor> Offset::positions(const std::optional<at::Tensor>& given,
                                            const at::Tensor& x, int64_t batch, int64_t seq,
                                            const std::optional<at::Tensor>& cu_seqlens) const {
  const bool documents = cu_seqlens.has_value();
  if (x.dim() <= std::max(batch, seq) || !(documents || of_samples_.has_value())) return given;
  if (documents) {
    TORCH_CHECK_VALUE(!given.has_value(), "cu_seqlens: expected none where positions are given");
    return positions_of_documents(*cu_seqlens, *this, x, batch, seq);
  }
  TORCH_CHECK_VALUE(!given.has_value(), "offset: expected 0 where positions are given, got ",
                    of_samples_->sizes());
  dispatcher::check_position_integers(*of_samples_, "offset");
  TORCH_CHECK_VALUE(batch >= 0, "offset: expected a number where there is no batch, got ",
                    of_samples_->sizes());
  TORCH_CHECK_VALUE(of_samples_->dim() == 1 && of_samples_->size(0) == x.size(batch),
                    "offset: expected a number or [batch] with batch ", x.size(batch), ", got ",
                    of_samples_->sizes());
  return of_samples_->unsqueeze(-1) + at::arange(x.size(seq), of_samples_->options());
}

const char* name(AdditiveLayout layout) { return layout == AdditiveLayout::bsd ? "bsd" : "sbd"; }

PositionCall PositionCall::sequence_first(const at::Tensor& x) const {
  std::optional<at::Tensor> own =
      offset_.positions(positions_, x, /*batch=*/1, /*seq=*/0, cu_seqlens_);
  const c10::SymInt seq = x.sym_size(0), batch = x.sym_size(1);
  if (!own.has_value()) {
    const auto options = x.options().dtype(at::kLong);
    own = at::arange(offset_.number(), offset_.number() + seq, options);
  } else {
    const bool counted = offset_.of_samples().has_value() || cu_seqlens_.has_value();
    TORCH_CHECK_VALUE(counted || offset_.number() == 0,
                      "offset: expected 0 where positions are given, got ", offset_.number());
  }
  const bool fits = own->dim() >= 1 && own->dim() <= 2 && own->sym_size(-1) == seq &&
                    (own->dim() == 1 || own->sym_size(0) == 1 || own->sym_size(0) == batch);
  TORCH_CHECK_VALUE(fits, "positions: expected [", seq, "] or [", batch, ", ", seq,
                    "] for x [seq, batch, dim], got ", own->sym_sizes());
  const at::Tensor rows = own->dim() == 1 ? own->unsqueeze(1) : own->t();
  return PositionCall(rows.expand_symint({seq, batch})).grid(grid_);
}

}  // namespace posembed
