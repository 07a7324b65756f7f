// Vector primitives in NEON (Advanced SIMD of Armv8-A). Included by core/vector.h only.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "core/macros.h"
#include "core/scalar.h"

namespace posembed::core {
inline namespace POSEMBED_ISA {

inline constexpr int64_t lanes = 4;
using Floats = float __attribute__((vector_size(16)));
using Words = uint32_t __attribute__((vector_size(16)));

POSEMBED_INLINE Floats fma(Floats a, Floats b, Floats c) {
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}

/// An ordinary store: Arm's cores recognise streams of stores and write them past the caches.
POSEMBED_INLINE void stream(Words value, void* out) { memcpy(out, &value, sizeof value); }

POSEMBED_INLINE void stream_fence() {}

POSEMBED_INLINE Floats even_elements(Floats a, Floats b) {
  return (Floats)vuzp1q_f32((float32x4_t)a, (float32x4_t)b);
}
POSEMBED_INLINE Floats odd_elements(Floats a, Floats b) {
  return (Floats)vuzp2q_f32((float32x4_t)a, (float32x4_t)b);
}
POSEMBED_INLINE Floats lower_neighbours(Floats a, Floats b) {
  return (Floats)vzip1q_f32((float32x4_t)a, (float32x4_t)b);
}
POSEMBED_INLINE Floats upper_neighbours(Floats a, Floats b) {
  return (Floats)vzip2q_f32((float32x4_t)a, (float32x4_t)b);
}

POSEMBED_INLINE Floats load_half(const Float16* in) {
  float16x4_t halves;
  memcpy(&halves, in, sizeof halves);
  return (Floats)vcvt_f32_f16(halves);
}

POSEMBED_INLINE Floats round_to_half(Floats value) {
  return (Floats)vcvt_f32_f16(vcvt_f16_f32((float32x4_t)value));
}

/// Joins the first halves of two vectors.
POSEMBED_INLINE Words join_first_halves(Words a, Words b) {
  return (Words)vcombine_u32(vget_low_u32((uint32x4_t)a), vget_low_u32((uint32x4_t)b));
}

/// Converts two vectors of floats to one of halves.
POSEMBED_INLINE Words join_half(Floats first, Floats second) {
  return (Words)vcvt_high_f16_f32(vcvt_f16_f32((float32x4_t)first), (float32x4_t)second);
}

/// The sum of all lanes: repeatedly adds the upper half to the lower half.
POSEMBED_INLINE float add_lanes(Floats value) {
  const auto all = (float32x4_t)value;
  return vpadds_f32(vadd_f32(vget_low_f32(all), vget_high_f32(all)));
}

/// Interleaves the upper halves of even and odd words.
POSEMBED_INLINE Words join_upper_halves(Words even, Words odd) {
  return (Words)vtrn2q_u16((uint16x8_t)even, (uint16x8_t)odd);
}

/// Rounds even and odd floats to bfloat16, to nearest even, and interleaves them. Adding 0x8000
/// rounds half up. A tie is then a word with lower half 0, whose upper half must lose its lowest
/// bit: the saturated sum with 0xfffe is 0xffff for any other lower half.
POSEMBED_INLINE Words join_bfloat16(Words even, Words odd) {
  const Words even_up = even + 0x8000u, odd_up = odd + 0x8000u;
  const uint16x8_t lower = vtrn1q_u16((uint16x8_t)even_up, (uint16x8_t)odd_up);
  const uint16x8_t kept = vqaddq_u16(lower, vdupq_n_u16(0xfffe));
  return join_upper_halves(even_up, odd_up) & (Words)kept;
}

/// The elementwise minimum of 16-bit halves.
POSEMBED_INLINE Words min_halves(Words a, Words b) {
  return (Words)vminq_u16((uint16x8_t)a, (uint16x8_t)b);
}

POSEMBED_INLINE bool any_lower_half_is_zero(Words value) {
  return vminvq_u16((uint16x8_t)(value | 0xffff0000u)) == 0;
}

}  // namespace POSEMBED_ISA
}  // namespace posembed::core
