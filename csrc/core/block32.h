// Rows in blocks of 32 elements of the compute type, so that one loop over a row serves all element
// types.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "core/fma.h"
#include "core/macros.h"
#include "core/scalar.h"
#include "core/vector.h"

// Makes the compiler inline a lambda; it stands after the lambda's parameters. Lambdas that take or
// return blocks need it, because a call would pass the blocks in memory instead of registers.
#define POSEMBED_INLINE_LAMBDA __attribute__((always_inline))

namespace posembed::core {
inline namespace POSEMBED_ISA {

inline constexpr int64_t block_size = 32;

/// Whether registers are wide enough to hold several blocks.
inline constexpr bool wide = lanes >= 16;

/// The number of elements in memory for a row of blocks.
POSEMBED_INLINE int64_t round_up_to_blocks(int64_t count) {
  return (count + block_size - 1) / block_size * block_size;
}

template <typename C>
struct LanesOf {
  using Type = Floats;
};

template <>
struct LanesOf<double> {
  using Type = double __attribute__((vector_size(sizeof(Floats))));
};

POSEMBED_INLINE LanesOf<double>::Type fma(LanesOf<double>::Type a, LanesOf<double>::Type b,
                                          LanesOf<double>::Type c) {
  LanesOf<double>::Type result;
  for (size_t k = 0; k < sizeof result / sizeof(double); ++k) {
    result[k] = core::fma(a[k], b[k], c[k]);
  }
  return result;
}

/// A block of elements of type T in registers, in the order of load_pair (core/vector.h), which for
/// bfloat16 differs from memory order.
template <typename T>
struct Block32 {
  using Lanes = typename LanesOf<Compute<T>>::Type;
  static constexpr size_t count = block_size * sizeof(Compute<T>) / sizeof(Lanes);
  Lanes part[count];
};

/// The indices of the parts as constants, which the compiler needs to unroll loops over registers.
template <typename T>
using Parts = std::make_index_sequence<Block32<T>::count>;

template <typename T, typename Function, size_t... k>
POSEMBED_INLINE Block32<T> map(Block32<T> a, Block32<T> b, const Function& function,
                               std::index_sequence<k...>) {
  return {{function(a.part[k], b.part[k])...}};
}

template <typename T, typename Function>
POSEMBED_INLINE Block32<T> map(Block32<T> a, Block32<T> b, const Function& function) {
  return map(a, b, function, Parts<T>{});
}

template <typename T>
POSEMBED_INLINE Block32<T> operator+(Block32<T> a, Block32<T> b) {
  return map(a, b, [](auto x, auto y) { return x + y; });
}

template <typename T>
POSEMBED_INLINE Block32<T> operator-(Block32<T> a, Block32<T> b) {
  return map(a, b, [](auto x, auto y) { return x - y; });
}

template <typename T>
POSEMBED_INLINE Block32<T> operator*(Block32<T> a, Block32<T> b) {
  return map(a, b, [](auto x, auto y) { return x * y; });
}

template <typename T>
POSEMBED_INLINE Block32<T> operator-(Block32<T> a, Compute<T> b) {
  return map(a, a, [b](auto x, auto) { return x - b; });
}

template <typename T>
POSEMBED_INLINE Block32<T> operator*(Block32<T> a, Compute<T> b) {
  return map(a, a, [b](auto x, auto) { return x * b; });
}

// Without an FMA instruction the code is long, so it is not inlined.
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define POSEMBED_FMA POSEMBED_INLINE
#else
#define POSEMBED_FMA [[maybe_unused, gnu::noinline]] static
#endif

template <typename T, size_t... k>
POSEMBED_FMA Block32<T> fma(Block32<T> a, Block32<T> b, Block32<T> c, std::index_sequence<k...>) {
  return {{fma(a.part[k], b.part[k], c.part[k])...}};
}

/// a * b + c, rounded once.
template <typename T>
POSEMBED_INLINE Block32<T> fma(Block32<T> a, Block32<T> b, Block32<T> c) {
  return fma(a, b, c, Parts<T>{});
}

/// The same number in every lane.
template <typename T>
POSEMBED_INLINE Block32<T> fill(Compute<T> value) {
  const Block32<T> zeros{};
  return map(zeros, zeros, [value](auto zero, auto) { return value - zero; });
}

/// The size of a whole block as a type, so that the compiler drops the tests for shorter ones.
using WholeBlock = std::integral_constant<int64_t, block_size>;

/// Calls body(i, count) for each block of a row. `count` is WholeBlock{}, or the size of a shorter
/// last block.
template <typename Body>
POSEMBED_INLINE void for_blocks(int64_t columns, const Body& body) {
  int64_t i = 0;
  for (; i + block_size <= columns; i += block_size) body(i, WholeBlock{});
  if (i < columns) body(i, columns - i);
}

/// Folds state = first(state, i, count) over the blocks of a row and calls second(i, count) for
/// each. They alternate every four blocks, so that each reads enough memory at a time. The state is
/// passed by value to stay in registers.
template <typename State, typename First, typename Second>
POSEMBED_INLINE State fold_blocks(int64_t columns, State state, const First& first,
                                  const Second& second) {
  constexpr int64_t step = wide ? 4 * block_size : block_size;
  int64_t i = 0;
  for (; i + step <= columns; i += step) {
    for (int64_t k = 0; k < step; k += block_size) state = first(state, i + k, WholeBlock{});
    for (int64_t k = 0; k < step; k += block_size) second(i + k, WholeBlock{});
  }
  if constexpr (wide) {
#pragma GCC unroll 1
    for (; i + block_size <= columns; i += block_size) {
      state = first(state, i, WholeBlock{});
      second(i, WholeBlock{});
    }
  }
  if (i < columns) {
    state = first(state, i, columns - i);
    second(i, columns - i);
  }
  return state;
}

// ---- memory of a row's arithmetic, in block order ----

template <typename T, size_t... k>
POSEMBED_INLINE Block32<T> load_values(const Compute<T>* in, std::index_sequence<k...>) {
  using Lanes = typename Block32<T>::Lanes;
  constexpr size_t width = sizeof(Lanes) / sizeof *in;
  return {{load_vector<Lanes>(in + k * width)...}};
}

template <typename T>
POSEMBED_INLINE Block32<T> load_values(const Compute<T>* in) {
  return load_values<T>(in, Parts<T>{});
}

template <bool streaming, typename T, size_t... k>
POSEMBED_INLINE void store_values(Block32<T> values, Compute<T>* out, std::index_sequence<k...>) {
  constexpr size_t width = sizeof(typename Block32<T>::Lanes) / sizeof *out;
  (store_vector<streaming>(values.part[k], out + k * width), ...);
}

template <bool streaming = false, typename T>
POSEMBED_INLINE void store_values(Block32<T> values, Compute<T>* out) {
  store_values<streaming>(values, out, Parts<T>{});
}

/// The index, in a block of T, of the element that `slot` holds.
template <typename T>
constexpr int64_t element_of_value(int64_t slot) {
  return slot / (2 * lanes) * (2 * lanes) + element_of_slot<T>(slot % (2 * lanes));
}

/// Reorders numbers from memory order to block order of T. `columns` is a multiple of a block.
template <typename T, typename C>
POSEMBED_INLINE void order_values(const C* POSEMBED_RESTRICT in, int64_t columns,
                                  C* POSEMBED_RESTRICT out) {
  for (int64_t i = 0; i < columns; i += block_size) {
    for (int64_t k = 0; k < block_size; ++k) out[i + k] = in[i + element_of_value<T>(k)];
  }
}

/// The first `count` elements; the others become zeros.
template <typename T>
POSEMBED_INLINE Block32<T> keep_first(Block32<T> values, int64_t count) {
  alignas(64) Compute<T> value[block_size];
  store_values(values, value);
  for (int64_t k = 0; k < block_size; ++k) {
    if (element_of_value<T>(k) >= count) value[k] = 0;
  }
  return load_values<T>(value);
}

template <typename T>
POSEMBED_INLINE Block32<T> keep_first(Block32<T> values, WholeBlock) {
  return values;
}

// ---- memory of elements ----

template <typename T, size_t... k>
POSEMBED_INLINE Block32<T> load_pairs(const T* in, std::index_sequence<k...>) {
  const FloatPair pair[] = {load_pair(in + int64_t{k} * 2 * lanes)...};
  Block32<T> result;
  ((result.part[2 * k] = pair[k].first, result.part[2 * k + 1] = pair[k].second), ...);
  return result;
}

template <typename T>
POSEMBED_INLINE Block32<T> load_block(const T* in, WholeBlock = {}) {
  if constexpr (std::is_same_v<T, double>) {
    return load_values<T>(in);
  } else {
    return load_pairs(in, std::make_index_sequence<Block32<T>::count / 2>{});
  }
}

/// Loads the first `count` elements, then zeros; reads no byte beyond them.
template <typename T>
POSEMBED_INLINE Block32<T> load_block(const T* in, int64_t count) {
  alignas(64) T buffer[block_size];
  load_part(in, count, buffer);
  return load_block(buffer);
}

/// Loads the first `count` elements in memory order, then zeros for the rest of a block.
template <typename T, typename Count>
POSEMBED_INLINE void load_elements(const T* POSEMBED_RESTRICT in, Count count,
                                   Compute<T>* POSEMBED_RESTRICT out) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    for (int64_t i = 0; i < count; ++i) out[i] = load(in[i]);
    for (int64_t i = count; i < block_size; ++i) out[i] = 0;
  } else {
    store_values(load_block(in, count), out);
  }
}

template <bool streaming, typename T, size_t... k>
POSEMBED_INLINE void store_pairs(Block32<T> values, T* out, std::index_sequence<k...>) {
  (store_pair<streaming>({values.part[2 * k], values.part[2 * k + 1]},
                         out + int64_t{k} * 2 * lanes),
   ...);
}

/// Rounds once and stores; with non-temporal stores if `streaming`, which need `out` aligned to
/// vectors.
template <bool streaming = false, typename T>
POSEMBED_INLINE void store_block(Block32<T> values, T* out, WholeBlock = {}) {
  if constexpr (std::is_same_v<T, double>) {
    store_values<streaming>(values, out);
  } else {
    store_pairs<streaming>(values, out, std::make_index_sequence<Block32<T>::count / 2>{});
  }
}

/// Stores the first `count` elements; writes no byte beyond them.
template <bool streaming = false, typename T>
POSEMBED_INLINE void store_block(Block32<T> values, T* out, int64_t count) {
  alignas(64) T buffer[block_size];
  store_block(values, buffer);
  store_part(buffer, count, out);
}

}  // namespace POSEMBED_ISA
}  // namespace posembed::core
