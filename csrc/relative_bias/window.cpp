// The bias of windows in two dimensions: a number for each head and difference of rows and columns.
// Liu et al., "Swin Transformer", arXiv:2103.14030; Bao et al., "BEiT", arXiv:2106.08254, which
// adds a class token; Liu et al., "Swin Transformer V2", arXiv:2111.09883, whose table is the
// output of an MLP for the logarithms of differences.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/log1p.h>
#include <ATen/ops/log2.h>
#include <ATen/ops/sign.h>
#include <ATen/ops/stack.h>
#include <torch/library.h>

#include <algorithm>

#include "dispatcher/checks.h"
#include "dispatcher/output_memory.h"
#include "relative_bias/operator.h"
#include "token/operator.h"

namespace posembed::relative_bias {
namespace {

/// The last rows of a table with a class token: from it to a cell, from a cell to it, to itself.
constexpr int64_t class_rows = 3;

/// The differences of a window, row by row, and its cells.
c10::SymInt differences(c10::SymIntArrayRef window) {
  c10::SymInt count = 1;
  for (const c10::SymInt& size : window) count *= size * 2 - 1;
  return count;
}

c10::SymInt cells_of(c10::SymIntArrayRef window) {
  c10::SymInt count = 1;
  for (const c10::SymInt& size : window) count *= size;
  return count;
}

void check_table(const Tensor& weight, c10::SymIntArrayRef window, const c10::SymInt& rows) {
  // weight: [differences (+ 3), num_heads]
  dispatcher::check_floating(weight, "weight");
  dispatcher::check_rank(weight, "weight", 2, "[num_buckets, num_heads]");
  TORCH_CHECK_VALUE(weight.sym_size(0) == rows, "weight: expected ", rows, " rows for the window ",
                    window, ", got ", weight.sym_sizes());
}

/// The index of query minus key along an axis: [size, size], 0 to 2 size - 2.
Tensor along(const c10::SymInt& size, const at::TensorOptions& options) {
  const Tensor places = at::arange(size, options);
  return places.unsqueeze(1) - places + (size - 1);
}

/// The row of each pair of query and key: [cells, cells].
Tensor rows_of_cells(c10::SymIntArrayRef window, const at::TensorOptions& options) {
  Tensor rows = along(window[0], options);
  c10::SymInt cells = window[0];
  for (const c10::SymInt& size : window.slice(1)) {
    const Tensor before = (rows * (size * 2 - 1)).unsqueeze(1).unsqueeze(3);
    cells *= size;
    rows = (before + along(size, options).unsqueeze(1)).reshape_symint({cells, cells});
  }
  return rows;
}

/// The same with a class token before the cells.
Tensor with_class_token(const Tensor& rows, const c10::SymInt& first) {
  const c10::SymInt cells = rows.sym_size(0);
  const auto fill = [&](const c10::SymInt& row, const c10::SymInt& queries,
                        const c10::SymInt& keys) {
    return at::full_symint({queries, keys}, row, rows.options());
  };
  const Tensor top = at::cat({fill(first + 2, 1, 1), fill(first, 1, cells)}, 1);
  return at::cat({top, at::cat({fill(first + 1, cells, 1), rows}, 1)});
}

Tensor bias(const Tensor& weight, c10::SymIntArrayRef window, bool class_token) {
  check_window(window, "window", 3);
  const c10::SymInt first = differences(window), tokens = cells_of(window) + class_token;
  check_table(weight, window, class_token ? first + class_rows : first);
  dispatcher::check_result({tokens, tokens, weight.sym_size(1)}, at::kDouble, "window");
  Tensor rows = rows_of_cells(window, at::TensorOptions(weight.device()).dtype(at::kLong));
  if (class_token) rows = with_class_token(rows, first);
  return token::look_up(weight, {rows}).permute({2, 0, 1}).contiguous();
}

/// The differences of the new window; rows of a class token do not change.
Tensor resample(const Tensor& weight, c10::SymIntArrayRef window, c10::SymIntArrayRef new_window,
                const learned::Resample& how) {
  check_window(window, "window");
  check_window(new_window, "new_window");
  const c10::SymInt first = differences(window), extra = weight.sym_size(0) - first;
  check_table(weight, window, extra == class_rows ? first + class_rows : first);
  const c10::SymInt from[] = {window[0] * 2 - 1, window[1] * 2 - 1},
                    to[] = {new_window[0] * 2 - 1, new_window[1] * 2 - 1};
  const Tensor cells = learned::learned_resample(weight.narrow_symint(0, 0, first), from, to, how);
  return at::cat({cells, weight.narrow_symint(0, first, extra)});
}

/// sign(d) log2(|d| + 1) / log2(8) of differences d, scaled so that the largest are 8; without a
/// window that scales, sign(d) ln(|d| + 1).
Tensor log_distances(const Tensor& like, c10::SymIntArrayRef window,
                     c10::SymIntArrayRef scale_window) {
  dispatcher::check_floating(like, "like");
  check_window(window, "window");
  if (!scale_window.empty()) check_window(scale_window, "scale_window");
  const at::ScalarType type = dispatcher::compute_type(like);
  const auto axis = [&](size_t i) {
    const at::TensorOptions options = at::TensorOptions(like.device()).dtype(type);
    const Tensor distances = at::arange(1 - window[i], window[i], options);
    if (scale_window.empty()) return at::sign(distances) * at::log1p(distances.abs());
    // A window of one cell has no distance but 0.
    const c10::SymInt largest = scale_window[i].sym_gt(1).guard_bool(__FILE__, __LINE__)
                                    ? scale_window[i] - 1
                                    : c10::SymInt(1);
    const Tensor scaled = distances * 8 / largest;
    return at::sign(scaled) * at::log2(scaled.abs() + 1) / 3;
  };
  const c10::SymInt rows = window[0] * 2 - 1, columns = window[1] * 2 - 1;
  const Tensor y = axis(0).unsqueeze(1).expand_symint({rows, columns});
  const Tensor x = axis(1).expand_symint({rows, columns});
  return at::stack({y, x}, -1).flatten(0, 1).to(like.scalar_type());
}

}  // namespace

void check_window(c10::SymIntArrayRef window, const char* argument, size_t most_axes) {
  const int64_t largest = int64_t{1} << (window.size() == 3 ? 14 : 20);
  const bool valid = window.size() >= 2 && window.size() <= most_axes &&
                     std::all_of(window.begin(), window.end(), [&](const c10::SymInt& size) {
                       return size >= 1 && (size.is_symbolic() || size <= largest);
                     });
  TORCH_CHECK_VALUE(valid, argument, ": expected the numbers of ",
                    most_axes == 3 ? "(frames,) " : "", "rows and columns, each 1 to ", largest,
                    ", got ", window);
}

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  relative_window_bias.compose_batched<bias>(m);
  relative_window_resample.compose_batched<resample>(m);
  relative_log_distances.compose_batched<log_distances>(m);
}

}  // namespace posembed::relative_bias
