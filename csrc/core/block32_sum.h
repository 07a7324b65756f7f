// Sums a block by repeatedly adding its upper half to its lower half, so that every instruction set
// gives the same bits.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/block32.h"

namespace posembed::core {
inline namespace POSEMBED_ISA {

/// The bits, in the compute type, of the largest magnitude that rounds to -0 in T: half of T's
/// smallest number.
template <typename T>
constexpr auto last_negative_zero() {
  if constexpr (std::is_same_v<T, double>) {
    return INT64_MIN;
  } else if constexpr (std::is_same_v<T, Float16>) {
    return INT32_MIN + 0x33000000;  // 2^-25
  } else {
    return std::is_same_v<T, BFloat16> ? INT32_MIN + 0x8000 : INT32_MIN;  // 2^-134
  }
}

/// The values with 0 in place of -0, as a sum that starts at 0 gives.
template <typename T>
POSEMBED_INLINE Block32<T> as_sum(Block32<T> values) {
  constexpr auto last = last_negative_zero<T>();
  typedef std::remove_const_t<decltype(last)> Bits __attribute__((vector_size(sizeof(Floats))));
  return map(values, values,
             [](auto x, auto) { return (decltype(x))((Bits)x & ((Bits)x > Bits{} + last)); });
}

/// The sum of all lanes: repeatedly adds the upper half to the lower half.
POSEMBED_INLINE double add_lanes(LanesOf<double>::Type value) {
  constexpr int64_t count = sizeof value / sizeof(double);
  double lane[count];
  memcpy(lane, &value, sizeof value);
  for (int64_t half = count / 2; half > 0; half /= 2) {
    for (int64_t k = 0; k < half; ++k) lane[k] += lane[k + half];
  }
  return lane[0];
}

template <size_t count, typename Lanes>
POSEMBED_INLINE auto add_parts(const Lanes* part) {
  if constexpr (count == 1) {
    return add_lanes(part[0]);
  } else {
    Lanes half[count / 2];
    for (size_t k = 0; k < count / 2; ++k) half[k] = part[k] + part[k + count / 2];
    return add_parts<count / 2>(half);
  }
}

/// The sum of a block, in the same order for any register width.
template <typename T>
POSEMBED_INLINE Compute<T> sum(Block32<T> values) {
  constexpr size_t half = Block32<T>::count / 2;
  // If registers hold even and odd elements, the block's halves are neighbours.
  constexpr bool neighbours = std::is_same_v<T, BFloat16>;
  typename Block32<T>::Lanes part[half];
  for (size_t k = 0; k < half; ++k) {
    part[k] = neighbours ? values.part[2 * k] + values.part[2 * k + 1]
                         : values.part[k] + values.part[k + half];
  }
  return add_parts<half>(part);
}

}  // namespace POSEMBED_ISA
}  // namespace posembed::core
