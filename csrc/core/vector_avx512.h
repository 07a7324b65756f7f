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

/// Even and odd floats as bfloat16, rounded to nearest even, side by side.
///
/// The upper halves of all words are gathered in one register and the lower halves in another; then
/// one comparison of 16-bit lanes finds those that round up: where the lower half is above 0x8000,
/// or equal and the upper half odd.
POSEMBED_INLINE Words join_bfloat16(Words even, Words odd) {
  const __m512i upper_to_lower = _mm512_set1_epi32(0x03020302);
  const __m512i lower_to_upper = _mm512_set1_epi32(0x01000100);
  const __m512i quarters = _mm512_set_epi64(
      0x0c0c0c0c08080808, 0x0404040400000000, 0x0c0c0c0c08080808, 0x0404040400000000,
      0x0c0c0c0c08080808, 0x0404040400000000, 0x0c0c0c0c08080808, 0x0404040400000000);
  const __m512i upper = _mm512_mask_shuffle_epi8((__m512i)odd, 0x3333333333333333u, (__m512i)even,
                                                 _mm512_add_epi8(upper_to_lower, quarters));
  const __m512i lower = _mm512_mask_shuffle_epi8((__m512i)even, 0xccccccccccccccccu, (__m512i)odd,
                                                 _mm512_add_epi8(lower_to_upper, quarters));
  // 0x8001 for an even upper half, 0x8000 for an odd one: 0x8000 | (~upper & 1).
  const __m512i threshold =
      _mm512_ternarylogic_epi32(upper, _mm512_set1_epi16(1), _mm512_set1_epi16(-0x8000), 0xae);
  const __mmask32 up = _mm512_cmpge_epu16_mask(lower, threshold);
  return (Words)_mm512_mask_sub_epi16(upper, up, upper, _mm512_set1_epi16(-1));
}

}  // namespace POSEMBED_ISA
}  // namespace posembed::core
