// The slopes of ALiBi: a geometric series over the heads. Press, Smith, Lewis, "Train Short, Test
// Long: Attention with Linear Biases", 2022, section 3.
#pragma once

#include <cstdint>

namespace posembed::alibi {

/// Far more heads than any model has. Slopes are computed one by one.
inline constexpr int64_t max_heads = 65536;

enum class SlopeKind : int8_t {
  /// The paper's series: powers of 2^(-max_bias / n) for n = 2^k heads. Other head counts take the
  /// series of the next lower power of two, then every second slope of the next higher one.
  paper,
  /// Powers of 2^(-max_bias / heads) for every head count.
  geometric,
};

/// The slope of head `head` (0 … heads - 1) of a model with `heads` heads, correctly rounded.
float slope(SlopeKind kind, double max_bias, int64_t heads, int64_t head);

}  // namespace posembed::alibi
