// The row of each pair of a query and a key in a table of relative positions. ALiBi's bias with
// slope 1 is the distance, which is exact in float64; ALiBi's checks, positions and documents thus
// serve here too.
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <torch/library.h>

#include <vector>

#include "relative_logits/kernel.h"
#include "relative_logits/operator.h"

namespace posembed::relative_logits {
namespace {

/// Distances float64 [queries, keys] or [batch, queries, keys]; -infinity where a key is hidden.
Tensor distances_of(const Tensor& like, const c10::SymInt& queries, const c10::SymInt& keys,
                    alibi::Call call) {
  call.apply_mask(true);
  const at::TensorOptions options = at::TensorOptions(like.device()).dtype(at::kDouble);
  // slopes: [1], or [2, 1] for keys left and right of the query
  const Tensor slopes =
      call.causal() ? at::ones({1}, options) : at::arange(1, -2, -2, options).unsqueeze(1);
  return alibi::alibi_bias(slopes, queries, keys, {}, call).select(-3, 0);
}

/// One axis of positions [axes, …].
alibi::Call of_axis(alibi::Call call, int64_t axis, int64_t axes) {
  const auto select = [&](const alibi::MaybeTensor& positions, const char* argument) {
    TORCH_CHECK_VALUE(
        positions.has_value() && positions->dim() >= 2 && positions->sym_size(0) == axes, argument,
        ": expected [", axes, ", length] or [", axes, ", batch, length] for the ", axes,
        " axes of num_buckets, got ",
        positions.has_value() ? positions->sym_sizes() : c10::SymIntArrayRef());
    return positions->select(0, axis);
  };
  call.query_positions(select(call.query_positions(), "query_positions"));
  call.key_positions(select(call.key_positions(), "key_positions"));
  return call;
}

/// [queries, keys] or [batch, queries, keys], or [axes, batch, queries, keys] of several axes,
/// whose tables follow one another. Of a grid, the rows of all axes are one number.
Tensor rows_of(const Tensor& like, c10::SymInt queries, c10::SymInt keys,
               at::IntArrayRef num_buckets, const Pairs& pairs) {
  const auto axes = static_cast<int64_t>(num_buckets.size());
  TORCH_CHECK_VALUE(axes >= 1, "num_buckets: expected a number for each axis, got none");
  const bool is_grid = pairs.bucketing.kind == RelativeBuckets::grid;
  std::vector<Tensor> rows;
  int64_t first = 0;
  for (int64_t axis = 0; axis < axes; ++axis) {
    const int64_t count = num_buckets[static_cast<size_t>(axis)];
    const Tensor distances =
        distances_of(like, queries, keys, axes == 1 ? pairs.call : of_axis(pairs.call, axis, axes));
    const Tensor hidden = distances.isinf();
    const Tensor buckets = relative_bias::relative_buckets(
        distances.masked_fill(hidden, 0).to(at::kLong), count, pairs.bucketing);
    const int64_t other = pairs.call.apply_mask() ? hidden_row : no_row;
    Tensor row = buckets + first;
    if (is_grid && axis > 0) row = rows.back() * count + buckets;
    if (pairs.bucketing.kind == RelativeBuckets::band) {
      row = row.masked_fill(buckets.lt(0), no_row);
    }
    row = row.masked_fill(hidden, other);
    if (is_grid) rows.clear();
    rows.push_back(row);
    first += is_grid ? 0 : count;
  }
  if (rows.size() == 1) return rows[0];
  const Tensor all = at::stack(rows);
  return all.dim() == 3 ? all.unsqueeze(1) : all;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) { relative_rows.compose<rows_of>(m); }

}  // namespace posembed::relative_logits
