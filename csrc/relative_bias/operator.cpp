// The relative-bias operators, composed of other operators, which provide gradients and
// compilation.
#include "relative_bias/operator.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/ceil.h>
#include <ATen/ops/full.h>
#include <ATen/ops/log.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <cmath>

#include "dispatcher/checks.h"
#include "dispatcher/output_memory.h"
#include "token/operator.h"

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

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  relative_buckets.compose_batched<buckets_of>(m);
  relative_bias.compose_batched<bias_of>(m);
}

}  // namespace posembed::relative_bias
