// The relative-bias operators, composed of other operators, which provide gradients and
// compilation.
#include "relative_bias/relative_bias_operator.h"

#include <algorithm>
#include <cmath>

#include "dispatcher/output_memory.h"
#include "token/token_operator.h"

namespace posembed::relative_bias {
namespace {

void check_bucketing(int64_t num_buckets, const Bucketing& bucketing) {
  const int64_t sides = bucketing.bidirectional ? 2 : 1;
  if (bucketing.kind == RelativeBuckets::deberta) {
    TORCH_CHECK_VALUE(bucketing.bidirectional,
                      "bidirectional: expected True for kind 'deberta', got False");
    TORCH_CHECK_VALUE(num_buckets >= 4 && num_buckets % 2 == 0,
                      "num_buckets: expected an even number, 4 or more, for kind 'deberta', got ",
                      num_buckets);
    TORCH_CHECK_VALUE(bucketing.max_distance > num_buckets / 4 + 1,
                      "max_distance: expected more than ", num_buckets / 4 + 1,
                      " for kind 'deberta', got ", bucketing.max_distance);
    return;
  }
  if (bucketing.kind != RelativeBuckets::t5) {
    TORCH_CHECK_VALUE(num_buckets > 0 && (!bucketing.bidirectional || num_buckets % 2 == 1),
                      "num_buckets: expected ", bucketing.bidirectional ? "an odd" : "a positive",
                      " number for kind '", name(bucketing.kind), "', got ", num_buckets);
    return;
  }
  TORCH_CHECK_VALUE(num_buckets >= 2 * sides && num_buckets % sides == 0, "num_buckets: expected ",
                    bucketing.bidirectional ? "an even number, 4" : "2", " or more, got ",
                    num_buckets);
  const int64_t exact = num_buckets / sides / 2;
  TORCH_CHECK_VALUE(bucketing.max_distance > exact, "max_distance: expected more than ", exact,
                    ", the distances with a bucket of their own, got ", bucketing.max_distance);
}

/// T5's buckets: one for each short distance, then ever wider ones up to max_distance. The
/// logarithm is computed in float32, as in training.
Tensor t5_buckets(const Tensor& distances, int64_t num_buckets, const Bucketing& bucketing) {
  const int64_t count = bucketing.bidirectional ? num_buckets / 2 : num_buckets, exact = count / 2;
  const Tensor length = bucketing.bidirectional ? distances.abs() : distances.neg().clamp_min(0);
  const double widest =
      std::log(static_cast<double>(bucketing.max_distance) / static_cast<double>(exact));
  const Tensor wide =
      at::log(length.to(at::kFloat) / exact).div(widest).mul(count - exact).to(at::kLong) + exact;
  const Tensor bucket = at::where(length.lt(exact), length, wide.clamp_max(count - 1));
  return bucketing.bidirectional ? bucket + distances.gt(0).to(at::kLong) * count : bucket;
}

/// DeBERTa's buckets, of query minus key: one for each distance up to the middle, then ever wider
/// ones up to max_distance. The logarithm is computed in float32, as in training.
Tensor deberta_buckets(const Tensor& distances, int64_t num_buckets, const Bucketing& bucketing) {
  const int64_t span = num_buckets / 2, middle = span / 2;
  const double most = static_cast<double>(bucketing.max_distance - 1) / static_cast<double>(middle);
  const Tensor widest = at::log(at::full({}, most, distances.options().dtype(at::kFloat)));
  const Tensor length = distances.abs();
  const Tensor wide = at::ceil(at::log(length.clamp_min(1) / middle) / widest * (middle - 1));
  const Tensor bucket = at::where(length.le(middle), length, wide.to(at::kLong) + middle);
  return (span - bucket * distances.sign()).clamp(0, num_buckets - 1);
}

/// One bucket for each distance; longer distances share the outermost, or have none in a band.
Tensor single_buckets(const Tensor& distances, int64_t num_buckets, const Bucketing& bucketing) {
  const int64_t longest = bucketing.bidirectional ? num_buckets / 2 : num_buckets - 1;
  const int64_t first = bucketing.bidirectional ? -longest : 0;
  if (bucketing.kind == RelativeBuckets::clipped) {
    return distances.clamp(-longest, -first) + longest;
  }
  const Tensor back = distances.neg(), bucket = back.clamp(first, longest) - first;
  return bucketing.kind == RelativeBuckets::band
             ? bucket.masked_fill(back.lt(first).logical_or(back.gt(longest)), -1)
             : bucket;
}

Tensor buckets_of(const Tensor& distances, int64_t num_buckets, const Bucketing& bucketing) {
  dispatcher::check_integers(distances, "distances");
  check_bucketing(num_buckets, bucketing);
  const Tensor wide = distances.to(at::kLong);
  switch (bucketing.kind) {
    case RelativeBuckets::t5:
      return t5_buckets(wide, num_buckets, bucketing);
    case RelativeBuckets::deberta:
      return deberta_buckets(wide, num_buckets, bucketing);
    default:
      return single_buckets(wide, num_buckets, bucketing);
  }
}

/// Looks up one row for each distance, and shifts the rows by one for each query.
Tensor bias_of(const Tensor& weight, c10::SymInt queries, c10::SymInt keys,
               const MaybeOffset& query_offset, const Bucketing& bucketing) {
  dispatcher::check_floating(weight, "weight");
  dispatcher::check_rank(weight, "weight", 2, "[num_buckets, num_heads]");
  dispatcher::check_length(queries, "query_length");
  dispatcher::check_length(keys, "key_length");
  constexpr int64_t farthest = int64_t{1} << 62;
  TORCH_CHECK_VALUE(!query_offset.has_value() || query_offset->is_symbolic() ||
                        (*query_offset >= -farthest && *query_offset <= farthest),
                    "query_offset: expected -2^62 to 2^62, got ", *query_offset);
  // The view below repeats one row of all distances for each query.
  dispatcher::check_result({weight.sym_size(1), queries, queries + keys}, weight.scalar_type(),
                           "query_length");
  const c10::SymInt heads = weight.sym_size(1), count = queries + keys;
  if (queries == 0) return weight.new_empty_symint({heads, queries, keys});
  // distances: [count], of the last query to the first key, and so on; one more than needed.
  const c10::SymInt first = 1 - queries - query_offset.value_or(keys - queries);
  const Tensor distances =
      at::arange(first, first + count, at::TensorOptions(weight.device()).dtype(at::kLong));
  const Tensor buckets =
      relative_buckets(distances, weight.sym_size(0).guard_int(__FILE__, __LINE__), bucketing);
  Tensor rows = token::look_up(weight, {buckets.clamp_min(0)}).t();  // [heads, count]
  if (bucketing.kind == RelativeBuckets::band) rows = rows.masked_fill(buckets.lt(0), 0);
  // Row i of the view begins i elements earlier, because it is one shorter than what is repeated.
  const Tensor repeated =
      rows.unsqueeze(1).expand_symint({heads, queries, count}).reshape_symint({heads, -1});
  return repeated.narrow_symint(1, queries - 1, queries * (count - 1))
      .view_symint({heads, queries, count - 1})
      .narrow_symint(2, 0, keys)
      .contiguous();
}

// ------------------------------------------------------------------------------------------ window
// The bias of windows in two dimensions: a number for each head and difference of rows and columns.
// Liu et al., "Swin Transformer", arXiv:2103.14030; Bao et al., "BEiT", arXiv:2106.08254, which
// adds a class token; Liu et al., "Swin Transformer V2", arXiv:2111.09883, whose table is the
// output of an MLP for the logarithms of differences.

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
  using posembed::dispatcher::define;
  const std::string bucketing = bucketing_schema;
  define(m, "relative_buckets(Tensor distances, int num_buckets, " + bucketing + ") -> Tensor");
  define(m,
         "relative_bias("
         "Tensor weight, "
         "SymInt query_length, "
         "SymInt key_length, "
         "SymInt? query_offset=None, " +
             bucketing + ") -> Tensor");
  define(m,
         "relative_window_bias(Tensor weight, SymInt[] window, bool class_token=False) -> Tensor");
  define(m,
         "relative_window_resample("
         "Tensor weight, "
         "SymInt[] window, "
         "SymInt[] new_window, " +
             learned::resampling_schema("bilinear") + ") -> Tensor");
  define(m,
         "relative_log_distances(Tensor like, SymInt[] window, SymInt[] scale_window) -> Tensor");
  relative_buckets.compose_batched<buckets_of>(m);
  relative_bias.compose_batched<bias_of>(m);
  relative_window_bias.compose_batched<bias>(m);
  relative_window_resample.compose_batched<resample>(m);
  relative_log_distances.compose_batched<log_distances>(m);
}

}  // namespace posembed::relative_bias
