// float8 e4m3fn, the type of caches of a quarter of float32's size: 4 bits of exponent, 3 of
// mantissa, no infinity, largest number 448. Micikevicius et al., "FP8 Formats for Deep Learning",
// 2022.
#pragma once

#include <cstdint>

#include "core/macros.h"
#include "core/scalar.h"

namespace posembed::core {

struct Float8 {
  uint8_t bits;
};

/// Rounds to nearest even; numbers beyond 448, infinities included, become 448, as PyTorch converts
/// what was clamped to that. NaN stays NaN.
POSEMBED_INLINE void store(float value, Float8* out) {
  const uint32_t bits = float_bits(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Every case is computed and one selected, so that compilers can vectorise the loops around this.
  const uint32_t normal = (magnitude - 0x3c000000u + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
  // Adding 2^14 lines the value up so that float32's own rounding keeps a multiple of 2^-9, the
  // smallest denormal.
  const uint32_t small = magnitude < 0x3c800000u ? magnitude : 0u;
  const uint32_t denormal = float_bits(float_from_bits(small) + 16384.0f) - 0x46800000u;
  uint32_t result = magnitude < 0x3c800000u ? denormal : normal;
  result = magnitude >= 0x43e00000u ? 0x7eu : result;
  result = magnitude > 0x7f800000u ? 0x7fu : result;
  out->bits = static_cast<uint8_t>(result | (bits >> 24 & 0x80u));
}

}  // namespace posembed::core
