// Positions of pictures that are packed one after another: a token's index tells its picture, its
// frame, its square and its place there, so nothing loops over pictures.
#include "positions/grids.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/stack.h>
#include <torch/library.h>

#include "dispatcher/checks.h"
#include "positions/items.h"
#include "positions/operator.h"

namespace posembed::positions {
namespace {

/// Bool [pictures]: whole squares, and no size below 0.
Tensor whole_squares(const Tensor& sizes, int64_t merge) {
  const Tensor squares = sizes.slice(1, 1).remainder(merge).eq(0);
  return sizes.ge(0).all(1).logical_and(squares.all(1));
}

/// Checks sizes [pictures, 3] on the CPU.
void check_sizes(const Tensor& sizes, int64_t merge, const Tensor& tokens, int64_t total) {
  const Tensor odd = whole_squares(sizes, merge).logical_not();
  if (odd.any().item<bool>()) {
    const int64_t picture = odd.nonzero()[0].item<int64_t>();
    TORCH_CHECK_VALUE(false, "grids: expected heights and widths that merge ", merge,
                      " divides, and no size below 0, got ", sizes[picture][1].item<int64_t>(),
                      " x ", sizes[picture][2].item<int64_t>(), " for picture ", picture);
  }
  TORCH_CHECK_VALUE(countable(sizes).item<bool>(), "grids: expected fewer than 2^53 tokens");
  TORCH_CHECK_VALUE(tokens.item<int64_t>() == total, "grids: expected ", total,
                    " tokens, num_tokens, got ", tokens.item<int64_t>());
}

/// Divides whole numbers; a divisor of 0, which only an empty picture has, counts as 1.
Tensor quotient(const Tensor& a, const Tensor& b) { return a.div(b.clamp_min(1), "floor"); }

}  // namespace

void check_grids(const Tensor& grids, const char* argument) {
  dispatcher::check_integers(grids, argument);
  TORCH_CHECK_VALUE(grids.dim() == 2 && (grids.sym_size(1) == 3 || grids.sym_size(1) == 2),
                    argument, ": expected [items, 3] or [items, 2], got ", grids.sym_sizes());
}

Places places_of(const Tensor& grids, int64_t merge, const MaybeSize& num_tokens) {
  check_grids(grids, "grids");
  TORCH_CHECK_VALUE(merge >= 1, "merge: expected 1 or more, got ", merge);
  dispatcher::check_length(merge, "merge");
  if (num_tokens.has_value()) dispatcher::check_length(*num_tokens, "num_tokens");
  const Tensor sizes = with_time(grids).to(at::kLong);  // [pictures, 3]
  const Tensor counts = sizes.prod(1), ends = counts.cumsum(0), total = counts.sum();
  const c10::SymInt size = num_tokens.has_value() ? *num_tokens : total.item().toSymInt();
  Places places;
  if (readable(grids)) {
    check_sizes(sizes, merge, total, size.expect_int());
  } else {
    places.fit = whole_squares(sizes, merge)
                     .all()
                     .logical_and(total.eq(at::Scalar(size)))
                     .logical_and(countable(sizes));
  }
  const Tensor tokens = at::arange(size, grids.options().dtype(at::kLong));
  // Tokens beyond the last picture, where grids do not fit, count as its own.
  const Tensor picture = at::searchsorted(ends, tokens, /*out_int32=*/false, /*right=*/true)
                             .clamp_max(at::Scalar(grids.sym_size(0) - 1));
  const auto of_picture = [&](const Tensor& column) { return column.index_select(0, picture); };
  places.height = of_picture(sizes.select(1, 1));
  places.width = of_picture(sizes.select(1, 2));
  const Tensor index = tokens - of_picture(ends - counts);
  const Tensor cells = places.height * places.width;
  places.time = quotient(index, cells);
  const Tensor cell = index - places.time * cells;
  const Tensor square = cell.div(merge * merge, "floor"), within = cell.remainder(merge * merge);
  const Tensor in_a_row = places.width.div(merge, "floor"), row = quotient(square, in_a_row);
  places.row = row * merge + within.div(merge, "floor");
  places.column = (square - row * in_a_row) * merge + within.remainder(merge);
  return places;
}

namespace {

Tensor compute_packed_grids(const Tensor& grids, Text order, int64_t merge, MaybeSize num_tokens) {
  check_order(order);
  const Places places = places_of(grids, merge, num_tokens);
  std::vector<Tensor> axes;
  for (const char axis : order) {
    axes.push_back(axis == 't' ? places.time : axis == 'h' ? places.row : places.column);
  }
  const Tensor positions = at::stack(axes);
  return places.fit.defined() ? or_none(positions, places.fit) : positions;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) { packed_grid_positions.compose<compute_packed_grids>(m); }

}  // namespace posembed::positions
