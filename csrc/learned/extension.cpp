// Lengthens tables of positions with torch's interpolation, except the rows before position 0, and
// computes the positions of tokens in padded sequences.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/upsample_bicubic2d.h>
#include <ATen/ops/upsample_bilinear2d.h>
#include <torch/library.h>

#include "core/brief.h"
#include "dispatcher/checks.h"
#include "dispatcher/output_memory.h"
#include "learned/operator.h"

namespace posembed::learned {
namespace {

/// Row p of the result is row p mod length.
Tensor repeat(const Tensor& rows, int64_t count) {
  const Tensor indices = at::arange(count, at::TensorOptions(rows.device()).dtype(at::kLong));
  return rows.index_select(0, at::remainder(indices, rows.size(0)));
}

/// The first and the last row do not change; the others are interpolated between them.
Tensor stretch(const Tensor& rows, int64_t count, const std::string& method) {
  // As an image in float32 or wider: [1, embedding_dim, length, 1].
  const Tensor image = rows.to(dispatcher::compute_type(rows)).t().unsqueeze(0).unsqueeze(-1);
  const Tensor result = method == "cubic"
                            ? at::upsample_bicubic2d(image, {count, 1}, /*align_corners=*/true)
                            : at::upsample_bilinear2d(image, {count, 1}, /*align_corners=*/true);
  return result.squeeze(-1).squeeze(0).t().to(rows.scalar_type());
}

Tensor extend(const Tensor& weight, int64_t max_positions, int64_t first_row,
              std::string_view method) {
  check_table(weight, "weight", first_row);
  const int64_t length = weight.size(0) - first_row;
  TORCH_CHECK_VALUE(method == "linear" || method == "cubic" || method == "repeat",
                    "method: expected 'linear', 'cubic' or 'repeat', got '", core::brief(method),
                    "'");
  TORCH_CHECK_VALUE(length > 0, "weight: expected rows to extend, got none");
  TORCH_CHECK_VALUE(max_positions >= length, "max_positions: expected ", length,
                    " or more, which the table has, got ", max_positions);
  dispatcher::check_result({max_positions, weight.size(1)}, at::kDouble, "max_positions");
  const Tensor rows = weight.narrow(0, first_row, length);
  const Tensor longer = method == "repeat" ? repeat(rows, max_positions)
                                           : stretch(rows, max_positions, std::string(method));
  return at::cat({weight.narrow(0, 0, first_row), longer}).contiguous();
}

Tensor positions_of_mask(const Tensor& mask, c10::SymInt past, c10::SymInt skip) {
  const at::ScalarType type = mask.scalar_type();
  TORCH_CHECK_TYPE(type == at::kBool || type == at::kInt || type == at::kLong,
                   "attention_mask: expected bool, int32 or int64, got ",
                   dispatcher::dtype_name(type));
  TORCH_CHECK_VALUE(mask.dim() >= 1, "attention_mask: expected [..., seq], got a number");
  TORCH_CHECK_VALUE(past >= 0, "past_length: expected 0 or more, got ", past);
  TORCH_CHECK_VALUE(skip >= 0 && skip <= mask.sym_size(-1), "past_length: expected 0 to ",
                    mask.sym_size(-1), ", the length of the mask, got ", skip);
  const Tensor kept = mask.to(at::kBool).to(at::kLong);
  const Tensor positions = at::cumsum(kept, -1).add(past).mul(kept).sub(1);
  return positions.slice_symint(-1, skip);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  learned_extend.compose<extend>(m);
  learned_positions.compose<positions_of_mask>(m);
}

}  // namespace posembed::learned
