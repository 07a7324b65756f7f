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

/// Two vectors of floats as one of halves.
POSEMBED_INLINE Words join_half(Floats first, Floats second) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return (Words)_mm256_set_m128i(_mm256_cvtps_ph(second, nearest), _mm256_cvtps_ph(first, nearest));
}

/// Adds what rounds the upper half of each word to nearest even.
POSEMBED_INLINE Words round_upper_half(Words bits) { return bits + 0x7fffu + (bits >> 16 & 1u); }

/// Even and odd bfloat16 elements, rounded and side by side.
POSEMBED_INLINE Words join_bfloat16(Words even, Words odd) {
  const Words lower = round_upper_half(even) >> 16;
  return (Words)_mm256_blend_epi16((__m256i)lower, (__m256i)round_upper_half(odd), 0xaa);
}

}  // namespace POSEMBED_ISA
}  // namespace posembed::core
