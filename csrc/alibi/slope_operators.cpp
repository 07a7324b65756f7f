// Operators that compute inputs of ALiBi: the slopes of heads, positions that skip padding, and the
// correction for a block of scores whose biases used local positions.
#include <ATen/DimVector.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ne.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>
#include <vector>

#include "alibi/kernel.h"
#include "alibi/operator.h"
#include "alibi/slopes.h"
#include "core/brief.h"
#include "dispatcher/host_floats.h"

namespace posembed::alibi {
namespace {

SlopeKind kind_of(Text kind) {
  if (kind == "paper") return SlopeKind::paper;
  if (kind == "geometric") return SlopeKind::geometric;
  TORCH_CHECK_VALUE(kind == "press", "kind: expected 'paper' or 'geometric', got '",
                    core::brief(kind), "'");
  static std::atomic<bool> is_said{false};  // TORCH_WARN_ONCE takes a lock, which a fork may copy
  if (!is_said.exchange(true)) {
    TORCH_WARN("The slopes 'press' are now called 'paper'; the old name is deprecated.");
  }
  return SlopeKind::paper;
}

/// Slopes [sides, num_heads] of a model's heads, starting at head_start; 0 for padding after them.
std::vector<float> slope_values(int64_t num_heads, Text kind, double max_bias, int64_t total,
                                int64_t head_start, at::ArrayRef<double> custom) {
  std::vector<float> values;
  if (custom.empty()) {
    const SlopeKind series = kind_of(kind);
    for (int64_t head = head_start; head < head_start + num_heads; ++head) {
      values.push_back(head < total ? slope(series, max_bias, total, head) : 0.0f);
    }
  }
  const int64_t own = std::min(num_heads, total - head_start);
  for (size_t row = 0; row < custom.size(); row += static_cast<size_t>(total)) {
    for (const double value :
         custom.slice(row + static_cast<size_t>(head_start), static_cast<size_t>(own))) {
      values.push_back(static_cast<float>(value));
    }
    values.insert(values.end(), static_cast<size_t>(num_heads - own), 0.0f);
  }
  return values;
}

Tensor slopes(int64_t num_heads, Text kind, double max_bias, std::optional<int64_t> total_heads,
              int64_t head_start, at::ArrayRef<double> values, double factor,
              std::optional<at::Device> device) {
  const int64_t total = total_heads.value_or(num_heads);
  TORCH_CHECK_VALUE(num_heads > 0, "num_heads: expected a positive number, got ", num_heads);
  TORCH_CHECK_VALUE(num_heads <= max_heads, "num_heads: expected at most ", max_heads, ", got ",
                    num_heads);
  TORCH_CHECK_VALUE(total <= max_heads, "total_heads: expected at most ", max_heads, ", got ",
                    total);
  // Equal shards of a number of heads that they do not divide: the last one is padded.
  const bool padded = head_start >= 0 && head_start < total && head_start % num_heads == 0;
  TORCH_CHECK_VALUE(padded || (head_start >= 0 && head_start <= total - num_heads),
                    "head_start: expected heads within total_heads, ", total,
                    ", or a multiple of num_heads below it, got head_start ", head_start,
                    " and num_heads ", num_heads);
  TORCH_CHECK_VALUE(std::isfinite(max_bias) && max_bias > 0,
                    "max_bias: expected a positive number, got ", max_bias);
  TORCH_CHECK_VALUE(std::isfinite(factor) && factor > 0, "factor: expected a positive number, got ",
                    factor);
  const auto count = static_cast<int64_t>(values.size());
  TORCH_CHECK_VALUE(count == 0 || count == total || count == 2 * total,
                    "values: expected none, or one or two for each of total_heads ", total,
                    ", got ", count);
  for (const double slope : values) {
    TORCH_CHECK_VALUE(std::isfinite(slope) && slope >= 0,
                      "slopes: expected finite numbers of at least 0, got ", slope,
                      "; the bias is minus the slope times the distance");
  }
  std::vector<float> all = slope_values(num_heads, kind, max_bias, total, head_start, values);
  for (float& slope : all) slope /= static_cast<float>(factor);
  const bool two_sided = count != 0 && count == 2 * total;
  const at::DimVector sizes = two_sided ? at::DimVector{2, num_heads} : at::DimVector{num_heads};
  return dispatcher::floats_on(device.value_or(at::kCPU), all, sizes);
}

/// JAIS and BTLM flatten the bias of texts that are longer than those in training. A symbolic
/// length is not compared, so that one compiled program serves all lengths.
Tensor scaled_slopes(const Tensor& slopes, c10::SymInt key_length, int64_t train_length) {
  TORCH_CHECK_VALUE(train_length > 0, "train_length: expected a positive number, got ",
                    train_length);
  if (!key_length.is_symbolic() && key_length <= train_length) return slopes;
  const Tensor length = at::full({}, at::Scalar(key_length.max(train_length)), at::kDouble);
  return slopes.div(length / train_length);
}

/// Numbers only visible keys, from 0, as Bloom does.
Tensor positions(const Tensor& attention_mask) {
  TORCH_CHECK_TYPE(at::isIntegralType(attention_mask.scalar_type(), /*includeBool=*/true),
                   "attention_mask: expected bool or integers, got ",
                   dispatcher::dtype_name(attention_mask.scalar_type()));
  TORCH_CHECK_VALUE(attention_mask.dim() >= 1,
                    "attention_mask: expected [key_length] or [batch, key_length], got []");
  const Tensor visible = attention_mask.ne(0);
  return (visible.cumsum(-1) - 1) * visible;
}

/// A block whose biases use local indices lacks the bias between its first key and first query,
/// which is constant along a row: slope * (key - query) in the form "distance", slope * key in the
/// form "key".
Tensor lse_correction(const Tensor& slopes, c10::SymInt query_length, c10::SymInt query_start,
                      c10::SymInt key_start, Text form, bool causal) {
  TORCH_CHECK_VALUE(form == "distance" || form == "key",
                    "form: expected 'distance' or 'key', got '", core::brief(form), "'");
  const Call call = ALiBiCall().query_offset(query_start - key_start).causal(causal);
  if (form == "key") return alibi_bias(slopes, query_length, 1, {}, call).squeeze(-1);
  const Tensor of_row = alibi_bias(slopes, 1, 1, {}, call).squeeze(-1);
  c10::SymDimVector sizes(of_row.sym_sizes().begin(), of_row.sym_sizes().end());
  sizes.back() = query_length;
  return of_row.expand_symint(sizes).contiguous();
}

}  // namespace

TORCH_LIBRARY_IMPL(posembed, CompositeExplicitAutograd, m) { m.impl("alibi_slopes", slopes); }

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  alibi_lse_correction.compose<lse_correction>(m);
  alibi_positions.compose<positions>(m);
  alibi_scaled_slopes.compose_batched<scaled_slopes>(m);
}

}  // namespace posembed::alibi
