// float8 e4m3fn for key-value caches: 4 bits of exponent, 3 of mantissa, no infinity, maximum 448.
// Micikevicius et al., "FP8 Formats for Deep Learning", 2022.
#pragma once

#include <cstdint>

#include "core/macros.h"
#include "core/scalar.h"

namespace posembed::core {

struct Float8 {
  uint8_t bits;
};

/// The bits of a number rounded to nearest even; numbers beyond 448, infinities included, become
/// 448, as in PyTorch after a clamp to 448. NaN stays NaN.
POSEMBED_INLINE uint32_t float8_bits(float value) {
  constexpr uint32_t largest = 0x43e00000u, smallest_normal = 0x3c800000u, infinity = 0x7f800000u;
  const uint32_t bits = float_bits(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t kept = magnitude < largest ? magnitude : largest;
  const uint32_t power = kept & infinity;
  const uint32_t binade = power > smallest_normal ? power : smallest_normal;
  // Adding 2^20 times the binade lines the value up so that float32's own rounding keeps a multiple
  // of an eighth of it.
  const uint32_t shift = binade + (20u << 23);
  const uint32_t eighths = float_bits(float_from_bits(kept) + float_from_bits(shift)) - shift;
  const uint32_t result = eighths + ((binade - smallest_normal) >> 20);
  return (magnitude > infinity ? 0x7fu : result) | (bits >> 24 & 0x80u);
}

/// The bits of two numbers, the first in the lower byte. On a GPU a NaN loses its sign.
POSEMBED_INLINE uint16_t float8_pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
#else
  return static_cast<uint16_t>(float8_bits(first) | float8_bits(second) << 8);
#endif
}

POSEMBED_INLINE void store(float value, Float8* out) {
  out->bits = static_cast<uint8_t>(float8_bits(value));
}

}  // namespace posembed::core
