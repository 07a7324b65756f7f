// Sums in a fixed number of lanes, whatever the width of the processor's registers: the same bits
// on every instruction set.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace posembed::core {

inline constexpr int64_t sum_lanes = 16;

/// The sum of value(i) over [0, count) in the type C.
template <typename C, typename Value>
POSEMBED_INLINE C lane_sum(int64_t count, const Value& value) {
  C lane[sum_lanes] = {};
  int64_t i = 0;
  for (; i + sum_lanes <= count; i += sum_lanes) {
    for (int64_t k = 0; k < sum_lanes; ++k) lane[k] += value(i + k);
  }
  for (; i < count; ++i) lane[i % sum_lanes] += value(i);
  for (int64_t half = sum_lanes / 2; half > 0; half /= 2) {
    for (int64_t k = 0; k < half; ++k) lane[k] += lane[k + half];
  }
  return lane[0];
}

}  // namespace posembed::core
