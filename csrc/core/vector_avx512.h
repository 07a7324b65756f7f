// Vector primitives in AVX-512 (F, BW, DQ, VL). Included by core/vector.h only.
#pragma once

// GCC bug 105593: the header's own "undefined" vectors raise a false warning.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#include <cstdint>

#include "core/macros.h"
#include "core/scalar.h"

namespace posembed::core {
inline namespace POSEMBED_ISA {

inline constexpr int64_t lanes = 16;
using Floats = float __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));

POSEMBED_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }

POSEMBED_INLINE void stream(Words value, void* out) {
  _mm512_stream_si512(static_cast<__m512i*>(out), (__m512i)value);
}

POSEMBED_INLINE void stream_fence() { _mm_sfence(); }

POSEMBED_INLINE Floats even_elements(Floats a, Floats b) { return _mm512_shuffle_ps(a, b, 0x88); }
POSEMBED_INLINE Floats odd_elements(Floats a, Floats b) { return _mm512_shuffle_ps(a, b, 0xdd); }
POSEMBED_INLINE Floats lower_neighbours(Floats a, Floats b) { return _mm512_unpacklo_ps(a, b); }
POSEMBED_INLINE Floats upper_neighbours(Floats a, Floats b) { return _mm512_unpackhi_ps(a, b); }

POSEMBED_INLINE Floats load_half(const Float16* in) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)));
}

/// Two vectors of floats as one of halves.
POSEMBED_INLINE Words join_half(Floats first, Floats second) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const __m512i lower = _mm512_castsi256_si512(_mm512_cvtps_ph(first, nearest));
  return (Words)_mm512_inserti64x4(lower, _mm512_cvtps_ph(second, nearest), 1);
}

/// Adds what rounds the upper half of each word to nearest even.
POSEMBED_INLINE Words round_upper_half(Words bits) {
  // bits + 0x7fff + (bits >> 16 & 1) = bits - ~((bits >> 16 & 1) | 0x7ffe); the bracket is one
  // instruction.
  const Words shifted = bits >> 16;
  const __m512i complement = _mm512_ternarylogic_epi32((__m512i)shifted, _mm512_set1_epi32(1),
                                                       _mm512_set1_epi32(0x7ffe), 0x15);
  return bits - (Words)complement;
}

/// Even and odd bfloat16 elements, rounded and side by side.
POSEMBED_INLINE Words join_bfloat16(Words even, Words odd) {
  const Words lower = round_upper_half(even) >> 16;
  return (Words)_mm512_mask_mov_epi16((__m512i)lower, 0xaaaaaaaau, (__m512i)round_upper_half(odd));
}

}  // namespace POSEMBED_ISA
}  // namespace posembed::core
