// Vector primitives for any processor: four lanes, written out. Included by core/vector.h only.
#pragma once

#include <cstdint>

#include "core/fma.h"
#include "core/macros.h"
#include "core/scalar.h"

namespace posembed::core {
inline namespace POSEMBED_ISA {

inline constexpr int64_t lanes = 4;
using Floats = float __attribute__((vector_size(16)));
using Words = uint32_t __attribute__((vector_size(16)));

POSEMBED_INLINE Floats fma(Floats a, Floats b, Floats c) {
  return Floats{core::fma(a[0], b[0], c[0]), core::fma(a[1], b[1], c[1]),
                core::fma(a[2], b[2], c[2]), core::fma(a[3], b[3], c[3])};
}

/// An ordinary store: portable code cannot bypass the caches.
POSEMBED_INLINE void stream(Words value, void* out) { memcpy(out, &value, sizeof value); }

POSEMBED_INLINE void stream_fence() {}

POSEMBED_INLINE Floats even_elements(Floats a, Floats b) { return Floats{a[0], a[2], b[0], b[2]}; }
POSEMBED_INLINE Floats odd_elements(Floats a, Floats b) { return Floats{a[1], a[3], b[1], b[3]}; }
POSEMBED_INLINE Floats lower_neighbours(Floats a, Floats b) {
  return Floats{a[0], b[0], a[1], b[1]};
}
POSEMBED_INLINE Floats upper_neighbours(Floats a, Floats b) {
  return Floats{a[2], b[2], a[3], b[3]};
}

POSEMBED_INLINE Floats load_half(const Float16* in) {
  return Floats{load(in[0]), load(in[1]), load(in[2]), load(in[3])};
}

/// Joins the first halves of two vectors.
POSEMBED_INLINE Words join_first_halves(Words a, Words b) { return Words{a[0], a[1], b[0], b[1]}; }

/// Converts two vectors of floats to one of halves.
POSEMBED_INLINE Words join_half(Floats first, Floats second) {
  Float16 halves[2 * lanes];
  for (int i = 0; i < lanes; ++i) store(first[i], halves + i);
  for (int i = 0; i < lanes; ++i) store(second[i], halves + lanes + i);
  Words joined;
  memcpy(&joined, halves, sizeof joined);
  return joined;
}

POSEMBED_INLINE Floats round_to_half(Floats value) {
  Float16 halves[lanes];
  for (int i = 0; i < lanes; ++i) store(value[i], halves + i);
  return load_half(halves);
}

/// The sum of all lanes: repeatedly adds the upper half to the lower half.
POSEMBED_INLINE float add_lanes(Floats value) {
  return (value[0] + value[2]) + (value[1] + value[3]);
}

/// Rounds the upper half of each word to nearest even.
POSEMBED_INLINE Words round_upper_half(Words bits) { return bits + 0x7fffu + (bits >> 16 & 1u); }

/// Interleaves the upper halves of even and odd words.
POSEMBED_INLINE Words join_upper_halves(Words even, Words odd) {
  return even >> 16 | (odd & 0xffff0000u);
}

/// Rounds even and odd floats to bfloat16 and interleaves them.
POSEMBED_INLINE Words join_bfloat16(Words even, Words odd) {
  return join_upper_halves(round_upper_half(even), round_upper_half(odd));
}

/// The elementwise minimum of 16-bit halves.
POSEMBED_INLINE Words min_halves(Words a, Words b) {
  using Halves = uint16_t __attribute__((vector_size(16)));
  const Halves x = (Halves)a, y = (Halves)b;
  return (Words)(x < y ? x : y);
}

POSEMBED_INLINE bool any_lower_half_is_zero(Words value) {
  const Words lower = value & 0xffffu;
  return lower[0] == 0 || lower[1] == 0 || lower[2] == 0 || lower[3] == 0;
}

}  // namespace POSEMBED_ISA
}  // namespace posembed::core
