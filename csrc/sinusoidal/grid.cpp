// The positions of a grid's cells: indices along each axis, which programs shift, scale, or divide
// by the size of the picture. Carion et al., "End-to-End Object Detection with Transformers"
// (DETR), arXiv:2005.12872; Esser et al. (Stable Diffusion 3), arXiv:2403.03206.
#include <ATen/ops/arange.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/stack.h>
#include <torch/library.h>

#include <vector>

#include "dispatcher/checks.h"
#include "dispatcher/output_memory.h"
#include "sinusoidal/operator.h"
#include "sinusoidal/specification.h"

namespace posembed::sinusoidal {
namespace {

void check_grid(c10::SymIntArrayRef grid, const Specification& spec, const MaybeTensor& mask) {
  TORCH_CHECK_VALUE(!spec.parts.empty() && grid.size() == spec.parts.size(),
                    "grid: expected a size for each of ", spec.parts.size(), " axes, got ", grid);
  for (const c10::SymInt& size : grid) {
    TORCH_CHECK_VALUE(size >= 1, "grid: expected sizes of at least 1, got ", grid);
    TORCH_CHECK_VALUE(spec.grid.max_size == 0 || size <= spec.grid.max_size,
                      "grid: expected at most max_size, ", spec.grid.max_size, ", got ", grid);
  }
  c10::SymDimVector sizes(grid.begin(), grid.end());
  sizes.emplace_back(static_cast<int64_t>(grid.size()));
  dispatcher::check_result(sizes, at::kDouble, "grid");
  if (!mask.has_value()) return;
  TORCH_CHECK_VALUE(grid.size() == 2 && spec.grid.max_size == 0,
                    "mask: expected none beside three axes or max_size");
  TORCH_CHECK_TYPE(mask->scalar_type() == at::kBool, "mask: expected bool, got ",
                   mask->scalar_type());
  TORCH_CHECK_VALUE(
      mask->dim() == 3 && mask->sym_size(1) == grid[0] && mask->sym_size(2) == grid[1],
      "mask: expected [batch, rows, columns] of the grid ", grid, ", got ", mask->sym_sizes());
}

/// Shifts and scales indices of an axis along `dim`, whose last is the largest.
Tensor scaled(const Tensor& indices, int64_t dim, const GridRule& rule, size_t axis) {
  Tensor result = indices + rule.start;
  if (rule.length > 0) {
    // A picture of padding alone has no cells.
    const Tensor cells = rule.max_size > 0 ? indices.new_full({1}, rule.max_size)
                                           : (indices.slice(dim, -1) + 1).clamp_min(1);
    result = result * rule.length / (cells + rule.epsilon);
  }
  return result / rule.interpolation_scale[axis];
}

/// The positions along an axis: [1, ...sizes].
Tensor along(const Tensor& like, c10::SymIntArrayRef grid, const GridRule& rule, size_t axis) {
  const at::TensorOptions options = at::TensorOptions(like.device()).dtype(at::kDouble);
  Tensor indices = at::arange(grid[axis], options);
  if (rule.max_size > 0) indices = indices + (rule.max_size - grid[axis]) / 2;
  const Tensor positions = scaled(indices, 0, rule, axis);
  c10::SymDimVector shape(grid.size() + 1, c10::SymInt(1)), sizes(grid.begin(), grid.end());
  shape[axis + 1] = grid[axis];
  sizes.insert(sizes.begin(), 1);
  return positions.view_symint(shape).expand_symint(sizes);
}

Tensor grid_positions(const Tensor& like, Text text, c10::SymIntArrayRef grid,
                      const MaybeTensor& mask) {
  const SpecificationPointer spec = specification(text);
  check_grid(grid, *spec, mask);
  std::vector<Tensor> axes;
  for (size_t axis = 0; axis < grid.size(); ++axis) {
    if (mask.has_value()) {
      const int64_t dim = static_cast<int64_t>(axis) + 1;
      const Tensor counted = at::cumsum(mask->to(at::kDouble), dim) - 1;
      axes.push_back(scaled(counted, dim, spec->grid, axis).flatten(1));
    } else {
      axes.push_back(along(like, grid, spec->grid, axis).flatten(1));
    }
  }
  return at::stack(axes);
}

/// The axis and the specification of each block of columns.
std::tuple<std::vector<int64_t>, std::vector<std::string>> blocks(Text text) {
  const SpecificationPointer spec = specification(text);
  if (spec->parts.empty()) return {{0}, {spec->spec.to_json()}};
  std::tuple<std::vector<int64_t>, std::vector<std::string>> result;
  for (const Part& part : spec->parts) {
    std::get<0>(result).push_back(part.axis);
    std::get<1>(result).push_back(part.text());
  }
  return result;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  sinusoidal_grid_positions.compose_batched<grid_positions>(m);
}

TORCH_LIBRARY_IMPL(posembed, CompositeExplicitAutograd, m) { m.impl("sinusoidal_blocks", blocks); }

}  // namespace posembed::sinusoidal
