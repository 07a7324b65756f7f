// Rows in runs of 32 elements in the compute type, so that a loop over rows is written once for all
// element types.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "core/fma.h"
#include "core/macros.h"
#include "core/scalar.h"
#include "core/vector.h"

// Follows the parameters of lambdas that work on runs: they must be inlined to keep runs in
// registers.
#define POSEMBED_INLINE_LAMBDA __attribute__((always_inline))

namespace posembed::core {
inline namespace POSEMBED_ISA {

inline constexpr int64_t run = 32;

/// Whether there are enough wide registers to hold several runs.
inline constexpr bool wide = lanes >= 16;

/// The number of elements in memory for a row of runs.
POSEMBED_INLINE int64_t round_up_to_runs(int64_t count) { return (count + run - 1) / run * run; }

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

/// A run of elements of type T in registers, in the order of load_pair (core/vector.h), which for
/// bfloat16 differs from memory order.
template <typename T>
struct Run {
  using Lanes = typename LanesOf<Compute<T>>::Type;
  static constexpr size_t count = run * sizeof(Compute<T>) / sizeof(Lanes);
  Lanes part[count];
};

/// The indices of the parts as constants: loops over registers are unrolled only with them.
template <typename T>
using Parts = std::make_index_sequence<Run<T>::count>;

template <typename T, typename Function, size_t... k>
POSEMBED_INLINE Run<T> map(Run<T> a, Run<T> b, const Function& function,
                           std::index_sequence<k...>) {
  return {{function(a.part[k], b.part[k])...}};
}

template <typename T, typename Function>
POSEMBED_INLINE Run<T> map(Run<T> a, Run<T> b, const Function& function) {
  return map(a, b, function, Parts<T>{});
}

template <typename T>
POSEMBED_INLINE Run<T> operator+(Run<T> a, Run<T> b) {
  return map(a, b, [](auto x, auto y) { return x + y; });
}

template <typename T>
POSEMBED_INLINE Run<T> operator-(Run<T> a, Run<T> b) {
  return map(a, b, [](auto x, auto y) { return x - y; });
}

template <typename T>
POSEMBED_INLINE Run<T> operator*(Run<T> a, Run<T> b) {
  return map(a, b, [](auto x, auto y) { return x * y; });
}

template <typename T>
POSEMBED_INLINE Run<T> operator-(Run<T> a, Compute<T> b) {
  return map(a, a, [b](auto x, auto) { return x - b; });
}

template <typename T>
POSEMBED_INLINE Run<T> operator*(Run<T> a, Compute<T> b) {
  return map(a, a, [b](auto x, auto) { return x * b; });
}

// Without an FMA instruction the code is long, so it is not inlined.
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define POSEMBED_FMA POSEMBED_INLINE
#else
#define POSEMBED_FMA [[maybe_unused, gnu::noinline]] static
#endif

template <typename T, size_t... k>
POSEMBED_FMA Run<T> fma(Run<T> a, Run<T> b, Run<T> c, std::index_sequence<k...>) {
  return {{fma(a.part[k], b.part[k], c.part[k])...}};
}

/// a * b + c, rounded once.
template <typename T>
POSEMBED_INLINE Run<T> fma(Run<T> a, Run<T> b, Run<T> c) {
  return fma(a, b, c, Parts<T>{});
}

/// The same number in every lane.
template <typename T>
POSEMBED_INLINE Run<T> fill(Compute<T> value) {
  const Run<T> zeros{};
  return map(zeros, zeros, [value](auto zero, auto) { return value - zero; });
}

/// The length of a whole run, as a type: the compiler can drop the tests for shorter ones.
using Whole = std::integral_constant<int64_t, run>;

/// Calls body(i, count) for each run of a row. `count` is Whole{}, except for a shorter last run.
template <typename Body>
POSEMBED_INLINE void for_runs(int64_t columns, const Body& body) {
  int64_t i = 0;
  for (; i + run <= columns; i += run) body(i, Whole{});
  if (i < columns) body(i, columns - i);
}

/// Folds state = first(state, i, count) over the runs of a row and also calls second(i, count) for
/// each. They alternate every four runs, so that each reads enough memory at a time. The state is
/// passed by value to stay in registers.
template <typename State, typename First, typename Second>
POSEMBED_INLINE State fold_runs(int64_t columns, State state, const First& first,
                                const Second& second) {
  constexpr int64_t step = wide ? 4 * run : run;
  int64_t i = 0;
  for (; i + step <= columns; i += step) {
    for (int64_t k = 0; k < step; k += run) state = first(state, i + k, Whole{});
    for (int64_t k = 0; k < step; k += run) second(i + k, Whole{});
  }
  if constexpr (wide) {
#pragma GCC unroll 1
    for (; i + run <= columns; i += run) {
      state = first(state, i, Whole{});
      second(i, Whole{});
    }
  }
  if (i < columns) {
    state = first(state, i, columns - i);
    second(i, columns - i);
  }
  return state;
}

// ---- memory of a row's arithmetic, in the order of runs ----

template <typename T, size_t... k>
POSEMBED_INLINE Run<T> load_values(const Compute<T>* in, std::index_sequence<k...>) {
  using Lanes = typename Run<T>::Lanes;
  constexpr size_t width = sizeof(Lanes) / sizeof *in;
  return {{load_vector<Lanes>(in + k * width)...}};
}

template <typename T>
POSEMBED_INLINE Run<T> load_values(const Compute<T>* in) {
  return load_values<T>(in, Parts<T>{});
}

template <bool streaming, typename T, size_t... k>
POSEMBED_INLINE void store_values(Run<T> values, Compute<T>* out, std::index_sequence<k...>) {
  constexpr size_t width = sizeof(typename Run<T>::Lanes) / sizeof *out;
  (store_vector<streaming>(values.part[k], out + k * width), ...);
}

template <bool streaming = false, typename T>
POSEMBED_INLINE void store_values(Run<T> values, Compute<T>* out) {
  store_values<streaming>(values, out, Parts<T>{});
}

/// The index, in a run of T, of the element that `slot` holds.
template <typename T>
constexpr int64_t element_of_value(int64_t slot) {
  return slot / (2 * lanes) * (2 * lanes) + element_of_slot<T>(slot % (2 * lanes));
}

/// Reorders numbers from memory order to the order of runs of T. `columns` is a multiple of a run.
template <typename T, typename C>
POSEMBED_INLINE void order_values(const C* POSEMBED_RESTRICT in, int64_t columns,
                                  C* POSEMBED_RESTRICT out) {
  for (int64_t i = 0; i < columns; i += run) {
    for (int64_t k = 0; k < run; ++k) out[i + k] = in[i + element_of_value<T>(k)];
  }
}

/// The first `count` elements; the others become zeros.
template <typename T>
POSEMBED_INLINE Run<T> keep(Run<T> values, int64_t count) {
  alignas(64) Compute<T> value[run];
  store_values(values, value);
  for (int64_t k = 0; k < run; ++k) {
    if (element_of_value<T>(k) >= count) value[k] = 0;
  }
  return load_values<T>(value);
}

template <typename T>
POSEMBED_INLINE Run<T> keep(Run<T> values, Whole) {
  return values;
}

// ---- memory of elements ----

template <typename T, size_t... k>
POSEMBED_INLINE Run<T> load_pairs(const T* in, std::index_sequence<k...>) {
  const FloatPair pair[] = {load_pair(in + int64_t{k} * 2 * lanes)...};
  Run<T> result;
  ((result.part[2 * k] = pair[k].first, result.part[2 * k + 1] = pair[k].second), ...);
  return result;
}

template <typename T>
POSEMBED_INLINE Run<T> load_run(const T* in, Whole = {}) {
  if constexpr (std::is_same_v<T, double>) {
    return load_values<T>(in);
  } else {
    return load_pairs(in, std::make_index_sequence<Run<T>::count / 2>{});
  }
}

/// Loads the first `count` elements, then zeros; reads no byte beyond them.
template <typename T>
POSEMBED_INLINE Run<T> load_run(const T* in, int64_t count) {
  alignas(64) T buffer[run];
  load_part(in, count, buffer);
  return load_run(buffer);
}

/// Loads the first `count` elements in memory order, then zeros for the rest of a run.
template <typename T, typename Count>
POSEMBED_INLINE void load_elements(const T* POSEMBED_RESTRICT in, Count count,
                                   Compute<T>* POSEMBED_RESTRICT out) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    for (int64_t i = 0; i < count; ++i) out[i] = load(in[i]);
    for (int64_t i = count; i < run; ++i) out[i] = 0;
  } else {
    store_values(load_run(in, count), out);
  }
}

template <bool streaming, typename T, size_t... k>
POSEMBED_INLINE void store_pairs(Run<T> values, T* out, std::index_sequence<k...>) {
  (store_pair<streaming>({values.part[2 * k], values.part[2 * k + 1]},
                         out + int64_t{k} * 2 * lanes),
   ...);
}

/// Rounds once and stores; past the caches if `streaming`, which needs `out` aligned to vectors.
template <bool streaming = false, typename T>
POSEMBED_INLINE void store_run(Run<T> values, T* out, Whole = {}) {
  if constexpr (std::is_same_v<T, double>) {
    store_values<streaming>(values, out);
  } else {
    store_pairs<streaming>(values, out, std::make_index_sequence<Run<T>::count / 2>{});
  }
}

/// Stores the first `count` elements; writes no byte beyond them.
template <bool streaming = false, typename T>
POSEMBED_INLINE void store_run(Run<T> values, T* out, int64_t count) {
  alignas(64) T buffer[run];
  store_run(values, buffer);
  store_part(buffer, count, out);
}

}  // namespace POSEMBED_ISA
}  // namespace posembed::core
