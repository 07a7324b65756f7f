// The rows of pictures of any sizes, packed one after another: each token is the weighted sum of
// the table's cells around it, as torch.nn.functional.interpolate weighs them. A bag of cells for
// each token, so nothing loops over pictures.
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include "bag/operator.h"
#include "dispatcher/checks.h"
#include "dispatcher/tensors.h"
#include "learned/operator.h"
#include "positions/grids.h"

namespace posembed::learned {
namespace {

using MaybeSize = std::optional<c10::SymInt>;

/// The cells around tokens along one axis: [tokens, 2], or [tokens, 4] for cubic interpolation.
struct Taps {
  Tensor cells;    // int64
  Tensor weights;  // float64
};

/// Keys' cubic convolution with the parameter that torch has, -0.75, at distances 1 + t, t, 1 - t
/// and 2 - t. Keys, "Cubic Convolution Interpolation for Digital Image Processing", 1981.
Tensor cubic_weights(const Tensor& t) {
  constexpr double a = -0.75;
  const auto near = [](const Tensor& d) { return ((a + 2) * d - (a + 3)) * d * d + 1; };
  const auto far = [](const Tensor& d) { return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a; };
  return at::stack({far(1 + t), near(t), near(1 - t), far(2 - t)}, -1);
}

/// index, size: [tokens], of a picture; cells: of the table.
Taps taps_of(const Tensor& index, const Tensor& size, const c10::SymInt& cells,
             const Resampling& how) {
  const at::Scalar side(cells), last(cells - 1);
  const Tensor from = index.to(at::kDouble), to = size.to(at::kDouble);
  Tensor place = how.align_corners() ? from * last / (to - 1).clamp_min(1)
                                     : (from + 0.5) * side / (to + how.scale_offset()) - 0.5;
  const bool linear = how.method() == "bilinear";
  if (linear) place = place.clamp_min(0);
  const Tensor before = place.floor(), t = place - before, cell = before.to(at::kLong);
  const auto at_distance = [&](const auto& d) { return (cell + d).clamp(at::Scalar(0), last); };
  if (linear) {
    // As in torch, an axis that keeps its size has no second cell, which might be infinite.
    const Tensor next = size.ne(side).to(at::kLong);
    return {at::stack({at_distance(0), at_distance(next)}, -1), at::stack({1 - t, t}, -1)};
  }
  return {at::stack({at_distance(-1), at_distance(0), at_distance(1), at_distance(2)}, -1),
          cubic_weights(t)};
}

Tensor compute_packed(const Tensor& weight, c10::SymIntArrayRef grid, const Tensor& grids,
                      int64_t merge, MaybeSize num_tokens, const Resample& call) {
  const c10::SymInt first = prefix_of(weight, grid);
  check_resampling(call.how);
  TORCH_CHECK_VALUE(!call.how.antialias(),
                    "antialias: expected False for packed pictures; join the tables of "
                    "resampled(grid) instead");
  const positions::Places places = positions::places_of(grids, merge, num_tokens);
  const Taps rows = taps_of(places.row, places.height, grid[0], call.how);
  const Taps columns = taps_of(places.column, places.width, grid[1], call.how);
  Tensor cells = rows.cells.unsqueeze(2) * at::Scalar(grid[1]) + columns.cells.unsqueeze(1) +
                 at::Scalar(first);  // [tokens, taps, taps]
  if (places.fit.defined()) cells = cells.masked_fill(places.fit.logical_not(), -1);
  const at::ScalarType type = dispatcher::compute_type(weight);
  const Tensor weights = (rows.weights.unsqueeze(2) * columns.weights.unsqueeze(1)).to(type);
  return bag::token_bag(weight.to(type), {cells.flatten(1), std::nullopt}, "sum",
                        weights.flatten(1), "dense")
      .to(weight.scalar_type());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) { learned_packed.compose<compute_packed>(m); }

}  // namespace posembed::learned
