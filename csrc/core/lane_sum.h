// Orders of sums with which every instruction set, and CUDA, gives the same bits.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace posembed::core {

/// Rows in a span. A sum adds the rows of each span, then the spans' sums in order. Long sums stay
/// accurate, and a CUDA device can add many spans in parallel and give the same bits as a CPU.
inline constexpr int64_t span = 64;

/// Lanes of a sum: two of the widest registers, so that an addition need not wait for the previous
/// one.
inline constexpr int64_t sum_lanes = 32;

/// Adds the upper half of the lanes to the lower half until one lane is left.
template <int64_t half, typename C>
POSEMBED_INLINE void fold(C* lane) {
  for (int64_t k = 0; k < half; ++k) lane[k] += lane[k + half];
  if constexpr (half > 1) fold<half / 2>(lane);
}

/// The sum of value(i) over [0, count) in the type C.
template <typename C, typename Value>
POSEMBED_INLINE C lane_sum(int64_t count, const Value& value) {
  C lane[sum_lanes] = {};
  int64_t i = 0;
  for (; i + sum_lanes <= count; i += sum_lanes) {
    for (int64_t k = 0; k < sum_lanes; ++k) lane[k] += value(i + k);
  }
  for (; i < count; ++i) lane[i % sum_lanes] += value(i);
  fold<sum_lanes / 2>(lane);
  return lane[0];
}

}  // namespace posembed::core
