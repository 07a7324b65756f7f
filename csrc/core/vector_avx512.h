// Vector primitives in AVX-512 (F, BW, DQ, VL). Included by core/vector.h only.
#pragma once

// GCC bug 105593: the header's own "undefined" vectors raise a false warning.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
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

/// Of the bytes of a vector the first `count`: none if negative, all from 64 on.
POSEMBED_INLINE __mmask64 first_bytes(int64_t count) {
  return count >= 64 ? ~uint64_t{0} : count <= 0 ? 0 : ~uint64_t{0} >> (64 - count);
}

/// The first `bytes` at `in`, then zeros; reads no byte beyond them.
POSEMBED_INLINE Words load_part(const void* in, int64_t bytes) {
  return (Words)_mm512_maskz_loadu_epi8(first_bytes(bytes), in);
}

/// Writes the first `bytes`, and no byte beyond them.
POSEMBED_INLINE void store_part(Words value, void* out, int64_t bytes) {
  _mm512_mask_storeu_epi8(out, first_bytes(bytes), (__m512i)value);
}

POSEMBED_INLINE Floats even_elements(Floats a, Floats b) { return _mm512_shuffle_ps(a, b, 0x88); }
POSEMBED_INLINE Floats odd_elements(Floats a, Floats b) { return _mm512_shuffle_ps(a, b, 0xdd); }
POSEMBED_INLINE Floats lower_neighbours(Floats a, Floats b) { return _mm512_unpacklo_ps(a, b); }
POSEMBED_INLINE Floats upper_neighbours(Floats a, Floats b) { return _mm512_unpackhi_ps(a, b); }

POSEMBED_INLINE Floats load_half(const Float16* in) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)));
}

inline constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

POSEMBED_INLINE Floats round_to_half(Floats value) {
  return _mm512_cvtph_ps(_mm512_cvtps_ph(value, nearest));
}

/// Two vectors of floats as one of halves.
POSEMBED_INLINE Words join_half(Floats first, Floats second) {
  const __m512i lower = _mm512_castsi256_si512(_mm512_cvtps_ph(first, nearest));
  return (Words)_mm512_inserti64x4(lower, _mm512_cvtps_ph(second, nearest), 1);
}

/// The sum of all lanes, by halves: upper to lower.
POSEMBED_INLINE float add_lanes(Floats value) {
  const __m256 half =
      _mm256_add_ps(_mm512_castps512_ps256(value), _mm512_extractf32x8_ps(value, 1));
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

/// Indices that shuffle bytes within each word; `pattern` has those of the first word of a quarter.
POSEMBED_INLINE __m512i word_shuffle(int pattern) {
  const __m512i words_of_quarter = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
  return _mm512_add_epi8(_mm512_set1_epi32(pattern), words_of_quarter);
}

/// The upper halves of even and odd words side by side.
POSEMBED_INLINE Words join_upper_halves(Words even, Words odd) {
  constexpr __mmask64 lower_bytes = 0x3333333333333333;
  return (Words)_mm512_mask_shuffle_epi8((__m512i)odd, lower_bytes, (__m512i)even,
                                         word_shuffle(0x03020302));
}

/// The lower halves of even and odd words side by side.
POSEMBED_INLINE Words join_lower_halves(Words even, Words odd) {
  constexpr __mmask64 upper_bytes = 0xcccccccccccccccc;
  return (Words)_mm512_mask_shuffle_epi8((__m512i)even, upper_bytes, (__m512i)odd,
                                         word_shuffle(0x01000100));
}

/// Even and odd floats as bfloat16, rounded to nearest even, side by side. One comparison of 16-bit
/// lanes finds those that round up: where the lower half is above 0x8000, or equal and the upper
/// half odd.
POSEMBED_INLINE Words join_bfloat16(Words even, Words odd) {
  const __m512i upper = (__m512i)join_upper_halves(even, odd);
  // 0x8001 for an even upper half, 0x8000 for an odd one: 0x8000 | (~upper & 1).
  const __m512i threshold =
      _mm512_ternarylogic_epi32(upper, _mm512_set1_epi16(1), _mm512_set1_epi16(-0x8000), 0xae);
  const __mmask32 up = _mm512_cmpge_epu16_mask((__m512i)join_lower_halves(even, odd), threshold);
  return (Words)_mm512_mask_sub_epi16(upper, up, upper, _mm512_set1_epi16(-1));
}

/// The smaller of each two 16-bit halves.
POSEMBED_INLINE Words least_halves(Words a, Words b) {
  return (Words)_mm512_min_epu16((__m512i)a, (__m512i)b);
}

POSEMBED_INLINE bool any_lower_half_is_zero(Words value) {
  return _mm512_testn_epi32_mask((__m512i)value, _mm512_set1_epi32(0xffff)) != 0;
}

}  // namespace POSEMBED_ISA
}  // namespace posembed::core
