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
#include <cstring>

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

template <typename Integer>
POSEMBED_INLINE __m128i load_integer(const void* in) {
  Integer value;
  memcpy(&value, in, sizeof value);
  return _mm_cvtsi64_si128(static_cast<int64_t>(value));
}

template <typename Integer>
POSEMBED_INLINE void store_integer(__m128i value, void* out) {
  const auto lowest = static_cast<Integer>(_mm_cvtsi128_si64(value));
  memcpy(out, &lowest, sizeof lowest);
}

/// Loads the first `bytes`, an even number, then zeros; reads no byte beyond them. Uses
/// power-of-two pieces, because a masked load waits for earlier stores to bytes that it does not
/// read.
POSEMBED_INLINE Words load_part(const void* in, int64_t bytes) {
  const auto load_half = [](const void* at) { return _mm256_loadu_si256((const __m256i*)at); };
  const auto load_quarter = [](const void* at) { return _mm_loadu_si128((const __m128i*)at); };
  if (bytes >= 64) return (Words)_mm512_loadu_si512(in);
  if (bytes == 32) return (Words)_mm512_zextsi256_si512(load_half(in));
  if (bytes == 16) return (Words)_mm512_zextsi128_si512(load_quarter(in));
  if (bytes <= 0) return Words{};
  const char* end = static_cast<const char*>(in) + bytes;
  __m128i quarter = _mm_setzero_si128();
  if (bytes & 2) quarter = load_integer<uint16_t>(end -= 2);
  if (bytes & 4) {
    quarter = _mm_or_si128(_mm_slli_si128(quarter, 4), load_integer<uint32_t>(end -= 4));
  }
  if (bytes & 8) quarter = _mm_unpacklo_epi64(load_integer<uint64_t>(end -= 8), quarter);
  __m256i half = _mm256_zextsi128_si256(quarter);
  if (bytes & 16) half = _mm256_set_m128i(quarter, load_quarter(end -= 16));
  if (!(bytes & 32)) return (Words)_mm512_zextsi256_si512(half);
  return (Words)_mm512_inserti64x4(_mm512_castsi256_si512(load_half(in)), half, 1);
}

/// Writes the first `bytes`, an even number, and no byte beyond them. Uses power-of-two pieces,
/// because a masked store delays later loads of bytes that it does not write.
POSEMBED_INLINE void store_part(Words value, void* out, int64_t bytes) {
  auto* to = static_cast<char*>(out);
  __m256i half = _mm512_castsi512_si256((__m512i)value);
  if (bytes <= 0) return;
  if (bytes >= 64) {
    _mm512_storeu_si512(to, (__m512i)value);
    return;
  }
  if (bytes & 32) {
    _mm256_storeu_si256((__m256i*)to, half);
    half = _mm512_extracti64x4_epi64((__m512i)value, 1);
    to += 32;
  }
  __m128i quarter = _mm256_castsi256_si128(half);
  if (bytes & 16) {
    _mm_storeu_si128((__m128i*)to, quarter);
    quarter = _mm256_extracti128_si256(half, 1);
    to += 16;
  }
  if (!(bytes & 15)) return;
  if (bytes & 8) {
    store_integer<uint64_t>(quarter, to);
    quarter = _mm_srli_si128(quarter, 8);
    to += 8;
  }
  if (bytes & 4) {
    store_integer<uint32_t>(quarter, to);
    quarter = _mm_srli_si128(quarter, 4);
    to += 4;
  }
  if (bytes & 2) store_integer<uint16_t>(quarter, to);
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

/// Joins the first halves of two vectors.
POSEMBED_INLINE Words join_first_halves(Words a, Words b) {
  return (Words)_mm512_inserti64x4((__m512i)a, _mm512_castsi512_si256((__m512i)b), 1);
}

/// Converts two vectors of floats to one of halves.
POSEMBED_INLINE Words join_half(Floats first, Floats second) {
  const __m512i lower = _mm512_castsi256_si512(_mm512_cvtps_ph(first, nearest));
  return (Words)_mm512_inserti64x4(lower, _mm512_cvtps_ph(second, nearest), 1);
}

/// The sum of all lanes: repeatedly adds the upper half to the lower half.
POSEMBED_INLINE float add_lanes(Floats value) {
  const __m256 half =
      _mm256_add_ps(_mm512_castps512_ps256(value), _mm512_extractf32x8_ps(value, 1));
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

/// Indices that shuffle bytes within each word. `pattern` has the indices of a quarter's first
/// word.
POSEMBED_INLINE __m512i word_shuffle(int pattern) {
  const __m512i words_of_quarter = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
  return _mm512_add_epi8(_mm512_set1_epi32(pattern), words_of_quarter);
}

/// Interleaves the upper halves of even and odd words.
POSEMBED_INLINE Words join_upper_halves(Words even, Words odd) {
  constexpr __mmask64 lower_bytes = 0x3333333333333333;
  return (Words)_mm512_mask_shuffle_epi8((__m512i)odd, lower_bytes, (__m512i)even,
                                         word_shuffle(0x03020302));
}

/// Interleaves the lower halves of even and odd words.
POSEMBED_INLINE Words join_lower_halves(Words even, Words odd) {
  constexpr __mmask64 upper_bytes = 0xcccccccccccccccc;
  return (Words)_mm512_mask_shuffle_epi8((__m512i)even, upper_bytes, (__m512i)odd,
                                         word_shuffle(0x01000100));
}

/// Rounds even and odd floats to bfloat16, to nearest even, and interleaves them. One comparison of
/// 16-bit lanes finds the words to round up: the lower half is above 0x8000, or equal to it and the
/// upper half is odd.
POSEMBED_INLINE Words join_bfloat16(Words even, Words odd) {
  const __m512i upper = (__m512i)join_upper_halves(even, odd);
  // 0x8001 for an even upper half, 0x8000 for an odd one: 0x8000 | (~upper & 1).
  const __m512i threshold =
      _mm512_ternarylogic_epi32(upper, _mm512_set1_epi16(1), _mm512_set1_epi16(-0x8000), 0xae);
  const __mmask32 up = _mm512_cmpge_epu16_mask((__m512i)join_lower_halves(even, odd), threshold);
  return (Words)_mm512_mask_sub_epi16(upper, up, upper, _mm512_set1_epi16(-1));
}

/// The elementwise minimum of 16-bit halves.
POSEMBED_INLINE Words min_halves(Words a, Words b) {
  return (Words)_mm512_min_epu16((__m512i)a, (__m512i)b);
}

POSEMBED_INLINE bool any_lower_half_is_zero(Words value) {
  return _mm512_testn_epi32_mask((__m512i)value, _mm512_set1_epi32(0xffff)) != 0;
}

}  // namespace POSEMBED_ISA
}  // namespace posembed::core
