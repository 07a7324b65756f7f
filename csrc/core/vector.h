// Vectors as wide as the registers of the instruction set that a kernel is compiled for, and their
// loads and stores in every element type. All names are in the instruction set's namespace, so
// copies of a kernel file never share them.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/macros.h"
#include "core/scalar.h"

#if defined(__AVX512F__)
#include "core/vector_avx512.h"
#elif defined(__AVX2__)
#include "core/vector_avx2.h"
#elif defined(__aarch64__)
#include "core/vector_neon.h"
#else
#include "core/vector_portable.h"
#endif

namespace posembed::core {
inline namespace POSEMBED_ISA {

/// Two vectors: 2 * lanes numbers, in an order that depends on their element type (see load_pair).
struct FloatPair {
  Floats first;
  Floats second;
};

POSEMBED_INLINE Words words(Floats value) { return (Words)value; }
POSEMBED_INLINE Floats floats(Words value) { return (Floats)value; }

template <typename Vector>
POSEMBED_INLINE Vector load_vector(const void* in) {
  Vector value;
  memcpy(&value, in, sizeof value);
#if defined(__x86_64__)
  // Keep the value in a register. Otherwise the compiler reloads it for every use, and loads are
  // the bottleneck.
  asm("" : "+v"(value));
#endif
  return value;
}

/// Writes `value`; with a non-temporal store if `streaming`, which needs `out` aligned to the
/// vector.
template <bool streaming, typename Vector>
POSEMBED_INLINE void store_vector(Vector value, void* out) {
  if constexpr (streaming) {
    stream((Words)value, out);
  } else {
    memcpy(out, &value, sizeof value);
  }
}

/// Reads 2 * lanes elements. For float and half: the first `lanes` elements, then the second.
POSEMBED_INLINE FloatPair load_pair(const float* in) {
  return {load_vector<Floats>(in), load_vector<Floats>(in + lanes)};
}

POSEMBED_INLINE FloatPair load_pair(const Float16* in) {
  return {load_half(in), load_half(in + lanes)};
}

/// The bfloat16 numbers in the lower and in the upper halves of words.
POSEMBED_INLINE FloatPair split_halves(Words both) {
  return {floats(both << 16), floats(both & 0xffff0000u)};
}

/// For bfloat16: the even elements, then the odd ones. One shift and one mask turn a word of two
/// into two floats, without a move across lanes.
POSEMBED_INLINE FloatPair load_pair(const BFloat16* in) {
  return split_halves(load_vector<Words>(in));
}

/// The 16-bit elements that load_pair would read, rounded to nearest even. For bfloat16, the lower
/// half of a NaN must be 0, as it is in NaNs from bfloat16 data or arithmetic: otherwise rounding
/// could carry into the sign.
template <typename T>
POSEMBED_INLINE Words join_pair(FloatPair value) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return join_bfloat16(words(value.first), words(value.second));
  } else {
    return join_half(value.first, value.second);
  }
}

/// The inverse of load_pair.
template <bool streaming = false, typename T>
POSEMBED_INLINE void store_pair(FloatPair value, T* out) {
  if constexpr (std::is_same_v<T, float>) {
    store_vector<streaming>(value.first, out);
    store_vector<streaming>(value.second, out + lanes);
  } else {
    store_vector<streaming>(join_pair<T>(value), out);
  }
}

/// The values rounded to T: load_pair after store_pair.
template <typename T>
POSEMBED_INLINE FloatPair rounded(FloatPair value) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return split_halves(join_pair<T>(value));
  } else if constexpr (std::is_same_v<T, Float16>) {
    return {round_to_half(value.first), round_to_half(value.second)};
  } else {
    return value;
  }
}

/// store_pair of each `values[i]` to `outs[i]`; for bfloat16 in fewer operations than one by one.
template <bool streaming, bool often_ties = false, typename T, size_t count>
POSEMBED_INLINE void store_pairs(const FloatPair (&values)[count], T* const (&outs)[count]) {
  for (size_t i = 0; i < count; ++i) store_pair<streaming>(values[i], outs[i]);
}

/// Adding 0x8000 rounds half up. That is cheaper than rounding to nearest even and gives the same
/// bits except for ties, whose lower half becomes 0. So all values are rounded half up and tested
/// for ties together; only if there is a tie, they are rounded again, to nearest even. Where ties
/// are frequent, `often_ties` rounds to nearest even at once.
template <bool streaming, bool often_ties = false, size_t count>
POSEMBED_INLINE void store_pairs(const FloatPair (&values)[count], BFloat16* const (&outs)[count]) {
  if constexpr (often_ties) {
    for (size_t i = 0; i < count; ++i) store_pair<streaming>(values[i], outs[i]);
    return;
  }
  Words joined[count], minima;
  for (size_t i = 0; i < count; ++i) {
    const Words even = words(values[i].first) + 0x8000u, odd = words(values[i].second) + 0x8000u;
    joined[i] = join_upper_halves(even, odd);
    minima = i == 0 ? min_halves(even, odd) : min_halves(minima, min_halves(even, odd));
  }
  if (__builtin_expect(any_lower_half_is_zero(minima), false)) {
    for (size_t i = 0; i < count; ++i) {
      joined[i] = join_bfloat16(words(values[i].first), words(values[i].second));
    }
  }
  for (size_t i = 0; i < count; ++i) store_vector<streaming>(joined[i], outs[i]);
}

/// Deinterleaves the pairs (2i, 2i + 1) of 2 * lanes elements into first and second members. The
/// order of pairs is that of the cheapest shuffle: see pair_of_lane.
template <typename T>
POSEMBED_INLINE FloatPair split_neighbours(FloatPair value) {
  if constexpr (std::is_same_v<T, BFloat16>) return value;  // load_pair has separated them
  return {even_elements(value.first, value.second), odd_elements(value.first, value.second)};
}

template <typename T>
POSEMBED_INLINE FloatPair join_neighbours(FloatPair value) {
  if constexpr (std::is_same_v<T, BFloat16>) return value;
  return {lower_neighbours(value.first, value.second), upper_neighbours(value.first, value.second)};
}

/// Which of `lanes` neighbouring pairs split_neighbours puts into `lane`.
template <typename T>
constexpr int64_t pair_of_lane(int64_t lane) {
  if (std::is_same_v<T, BFloat16>) return lane;
  // Registers are shuffled in quarters of four floats: two pairs of the first vector, two of the
  // second.
  const int64_t quarter = lane / 4;
  return lane % 4 / 2 * (lanes / 2) + quarter * 2 + lane % 2;
}

/// Which of 2 * lanes elements load_pair puts into `slot`.
template <typename T>
constexpr int64_t element_of_slot(int64_t slot) {
  if (!std::is_same_v<T, BFloat16>) return slot;
  return slot < lanes ? 2 * slot : 2 * (slot - lanes) + 1;
}

/// Fills a buffer of whole vectors with the first `count` elements at `in`, then zeros; reads no
/// byte beyond them.
template <typename T, size_t size>
POSEMBED_INLINE void load_part(const T* in, int64_t count, T (&buffer)[size]) {
#if defined(__AVX512F__)
  const int64_t bytes = count * int64_t{sizeof(T)};
  for (int64_t at = 0; at < int64_t{sizeof buffer}; at += int64_t{sizeof(Words)}) {
    const Words part = load_part(reinterpret_cast<const char*>(in) + at, bytes - at);
    store_vector<false>(part, reinterpret_cast<char*>(buffer) + at);
  }
#else
  memset(buffer, 0, sizeof buffer);
  memcpy(buffer, in, static_cast<size_t>(count) * sizeof(T));
#endif
}

/// Copies `bytes`, an even number up to `piece`, in power-of-two pieces.
template <int64_t piece>
POSEMBED_INLINE void copy_pieces(const char* in, int64_t bytes, char* out) {
  if (bytes >= piece) {
    memcpy(out, in, piece);
    in += piece;
    out += piece;
    bytes -= piece;
  }
  if constexpr (piece > 2) copy_pieces<piece / 2>(in, bytes, out);
}

/// Writes the first `count` elements of a buffer of whole vectors, and no byte beyond them.
template <typename T, size_t size>
POSEMBED_INLINE void store_part(const T (&buffer)[size], int64_t count, T* out) {
  const auto* from = reinterpret_cast<const char*>(buffer);
  auto* to = reinterpret_cast<char*>(out);
  const int64_t bytes = count * int64_t{sizeof(T)};
#if defined(__AVX512F__)
  for (int64_t at = 0; at < int64_t{sizeof buffer}; at += int64_t{sizeof(Words)}) {
    store_part(load_vector<Words>(from + at), to + at, bytes - at);
  }
#else
  copy_pieces<sizeof buffer>(from, bytes, to);
#endif
}

/// load_pair of the first `count` of 2 * lanes elements; reads no byte beyond them.
template <typename T>
POSEMBED_INLINE FloatPair load_pair(const T* in, int64_t count) {
  alignas(64) T buffer[2 * lanes];
  load_part(in, count, buffer);
  return load_pair(buffer);
}

/// store_pair of the first `count` of 2 * lanes elements; writes no byte beyond them.
template <typename T>
POSEMBED_INLINE void store_pair(FloatPair value, T* out, int64_t count) {
  alignas(64) T buffer[2 * lanes];
  store_pair(value, buffer);
  store_part(buffer, count, out);
}

}  // namespace POSEMBED_ISA
}  // namespace posembed::core
