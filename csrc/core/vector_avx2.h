// Vector primitives in AVX2 with FMA and F16C. Included by core/vector.h only.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "core/macros.h"
#include "core/scalar.h"

namespace posembed::core {
inline namespace POSEMBED_ISA {

inline constexpr int64_t lanes = 8;
using Floats = float __attribute__((vector_size(32)));
using Words = uint32_t __attribute__((vector_size(32)));

POSEMBED_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }

POSEMBED_INLINE void stream(Words value, void* out) {
  _mm256_stream_si256(static_cast<__m256i*>(out), (__m256i)value);
}

POSEMBED_INLINE void stream_fence() { _mm_sfence(); }

POSEMBED_INLINE Floats even_elements(Floats a, Floats b) { return _mm256_shuffle_ps(a, b, 0x88); }
POSEMBED_INLINE Floats odd_elements(Floats a, Floats b) { return _mm256_shuffle_ps(a, b, 0xdd); }
POSEMBED_INLINE Floats lower_neighbours(Floats a, Floats b) { return _mm256_unpacklo_ps(a, b); }
POSEMBED_INLINE Floats upper_neighbours(Floats a, Floats b) { return _mm256_unpackhi_ps(a, b); }

POSEMBED_INLINE Floats load_half(const Float16* in) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
}

inline constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

POSEMBED_INLINE Floats round_to_half(Floats value) {
  return _mm256_cvtph_ps(_mm256_cvtps_ph(value, nearest));
}

/// Joins the first halves of two vectors.
POSEMBED_INLINE Words join_first_halves(Words a, Words b) {
  return (Words)_mm256_permute2x128_si256((__m256i)a, (__m256i)b, 0x20);
}

/// Converts two vectors of floats to one of halves.
POSEMBED_INLINE Words join_half(Floats first, Floats second) {
  return (Words)_mm256_set_m128i(_mm256_cvtps_ph(second, nearest), _mm256_cvtps_ph(first, nearest));
}

/// The sum of all lanes: repeatedly adds the upper half to the lower half.
POSEMBED_INLINE float add_lanes(Floats value) {
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
  const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

/// Interleaves the upper halves of even and odd words.
POSEMBED_INLINE Words join_upper_halves(Words even, Words odd) {
  return (Words)_mm256_blend_epi16((__m256i)(even >> 16), (__m256i)odd, 0xaa);
}

/// Interleaves the lower halves of even and odd words.
POSEMBED_INLINE Words join_lower_halves(Words even, Words odd) {
  return (Words)_mm256_blend_epi16((__m256i)even, (__m256i)(odd << 16), 0xaa);
}

/// Rounds even and odd floats to bfloat16, to nearest even, and interleaves them. Adding 0x8000
/// rounds half up. A tie is then a word with lower half 0, whose upper half must lose its lowest
/// bit: the saturated sum with 0xfffe is 0xffff for any other lower half.
POSEMBED_INLINE Words join_bfloat16(Words even, Words odd) {
  const Words even_up = even + 0x8000u, odd_up = odd + 0x8000u;
  const __m256i lower = (__m256i)join_lower_halves(even_up, odd_up);
  const __m256i kept = _mm256_adds_epu16(lower, _mm256_set1_epi16(-2));
  return join_upper_halves(even_up, odd_up) & (Words)kept;
}

/// The elementwise minimum of 16-bit halves.
POSEMBED_INLINE Words min_halves(Words a, Words b) {
  return (Words)_mm256_min_epu16((__m256i)a, (__m256i)b);
}

POSEMBED_INLINE bool any_lower_half_is_zero(Words value) {
  const __m256i zero = _mm256_cmpeq_epi16((__m256i)value, _mm256_setzero_si256());
  return (_mm256_movemask_epi8(zero) & 0x33333333) != 0;
}

}  // namespace POSEMBED_ISA
}  // namespace posembed::core
