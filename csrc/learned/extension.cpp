// Lengthens tables of positions and resamples grids of them with torch's interpolation, except the
// rows before position 0 or before the grid, and computes the positions of tokens in padded
// sequences.
#include <ATen/ops/_upsample_bicubic2d_aa.h>
#include <ATen/ops/_upsample_bilinear2d_aa.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/upsample_bicubic2d.h>
#include <ATen/ops/upsample_bilinear2d.h>
#include <torch/library.h>

#include <cmath>

#include "core/brief.h"
#include "dispatcher/checked.h"
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

/// torch.nn.functional.interpolate for an image [1, embedding_dim, rows, columns].
Tensor interpolate(const Tensor& image, c10::SymIntArrayRef size, const Resampling& how) {
  // Without an offset, torch divides the sizes itself.
  const auto scale = [&](int64_t axis, const c10::SymInt& to) -> std::optional<double> {
    if (how.scale_offset() == 0) return std::nullopt;
    const int64_t from = image.sym_size(2 + axis).guard_int(__FILE__, __LINE__);
    return (static_cast<double>(to.guard_int(__FILE__, __LINE__)) + how.scale_offset()) /
           static_cast<double>(from);
  };
  const auto rows = scale(0, size[0]), columns = scale(1, size[1]);
  const bool corners = how.align_corners(), cubic = how.method() == "bicubic";
  if (how.antialias()) {
    return cubic ? at::_upsample_bicubic2d_aa_symint(image, size, corners, rows, columns)
                 : at::_upsample_bilinear2d_aa_symint(image, size, corners, rows, columns);
  }
  return cubic ? at::upsample_bicubic2d_symint(image, size, corners, rows, columns)
               : at::upsample_bilinear2d_symint(image, size, corners, rows, columns);
}

/// The image keeps the order of the table in memory, so it is a view of it.
Tensor resample(const Tensor& weight, c10::SymIntArrayRef grid, c10::SymIntArrayRef new_grid,
                const Resample& call) {
  const Resampling& how = call.how;
  const c10::SymInt first = prefix_of(weight, grid), dim = weight.sym_size(1);
  check_grid(new_grid, "new_grid");
  check_resampling(how);
  dispatcher::check_result({new_grid[0], new_grid[1], dim}, at::kDouble, "new_grid");
  const c10::SymInt count = new_grid[0] * new_grid[1];
  if (dim == 0) return weight.new_empty_symint({first + count, dim});  // torch refuses no channels
  const Tensor cells = weight.narrow_symint(0, first, grid[0] * grid[1])
                           .to(dispatcher::compute_type(weight))
                           .reshape_symint({grid[0], grid[1], dim});
  const Tensor image = cells.permute({2, 0, 1}).unsqueeze(0);
  c10::SymDimVector size(new_grid.begin(), new_grid.end());
  if (how.antialias() && how.method() == "bicubic" && image.requires_grad()) {
    // torch's backward operator of this mode has no Meta kernel for symbolic sizes.
    for (c10::SymInt& length : size) length = length.guard_int(__FILE__, __LINE__);
  }
  const Tensor resampled = interpolate(image, size, how).squeeze(0).permute({1, 2, 0});
  const Tensor patches = resampled.reshape_symint({count, dim}).to(weight.scalar_type());
  return at::cat({weight.narrow_symint(0, 0, first), patches});
}

Tensor positions_of_mask(const Tensor& mask, c10::SymInt past, c10::SymInt skip) {
  const at::ScalarType type = mask.scalar_type();
  TORCH_CHECK_TYPE(type == at::kBool || type == at::kInt || type == at::kLong,
                   "attention_mask: expected bool, int32 or int64, got ",
                   dispatcher::dtype_name(type));
  TORCH_CHECK_VALUE(mask.dim() >= 1, "attention_mask: expected [..., seq], got a number");
  dispatcher::check_length(past, "past_length");
  TORCH_CHECK_VALUE(skip >= 0 && skip <= mask.sym_size(-1), "past_length: expected 0 to ",
                    mask.sym_size(-1), ", the length of the mask, got ", skip);
  const Tensor kept = mask.to(at::kBool).to(at::kLong);
  const Tensor positions = at::cumsum(kept, -1).add(past).mul(kept).sub(1);
  return positions.slice_symint(-1, skip);
}

}  // namespace

void check_grid(c10::SymIntArrayRef grid, const char* argument) {
  TORCH_CHECK_VALUE(grid.size() == 2 && grid[0] >= 1 && grid[1] >= 1, argument,
                    ": expected the numbers of rows and columns, each 1 or more, got ", grid);
  dispatcher::product(grid[0], grid[1], argument);
}

c10::SymInt prefix_of(const Tensor& weight, c10::SymIntArrayRef grid) {
  check_table(weight, "weight", 0);
  check_grid(grid, "grid");
  const c10::SymInt rows = weight.sym_size(0);
  TORCH_CHECK_VALUE(grid[0] * grid[1] <= rows, "grid: expected at most ", rows,
                    " cells, the rows of weight, got ", grid);
  return rows - grid[0] * grid[1];
}

void check_resampling(const Resampling& how) {
  TORCH_CHECK_VALUE(how.method() == "bicubic" || how.method() == "bilinear",
                    "method: expected 'bicubic' or 'bilinear', got '", core::brief(how.method()),
                    "'");
  TORCH_CHECK_VALUE(std::isfinite(how.scale_offset()) && how.scale_offset() >= 0,
                    "scale_offset: expected a finite number of at least 0, got ",
                    how.scale_offset());
}

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  learned_extend.compose<extend>(m);
  learned_resample.compose<resample>(m);
  learned_positions.compose<positions_of_mask>(m);
}

}  // namespace posembed::learned
