// Rotates a pair (x, y) with the roundings of a PyTorch program, for numerics that reproduce its
// bits (docs/guide/rotary_bits.md). `ProductRounding` says how x * cos and y * sin are rounded
// before they are added. to_data_type: each to the type of the data, as elementwise operators do.
// none: only the result is rounded. fused: the addition is fused with one of them, as nvcc compiles
// a product of complex numbers.
#pragma once

#include "core/fma.h"
#include "core/scalar.h"
#include "rotary/kernel.h"

/// For functions that rotate pairs of doubles step by step in a loop, where GCC 12 fuses
/// multiplications and additions despite -ffp-contract=off.
#if defined(__GNUC__) && !defined(__clang__)
#define POSEMBED_IN_STEPS __attribute__((optimize("no-tree-slp-vectorize")))
#else
#define POSEMBED_IN_STEPS
#endif

namespace posembed::rotary {

/// `value` rounded to T.
template <typename T>
POSEMBED_INLINE core::Compute<T> rounded(core::Compute<T> value) {
  T kept;
  core::store(value, &kept);
  return core::load(kept);
}

template <ProductRounding rounding, typename T>
POSEMBED_INLINE void rotate_in_steps(T x_in, T y_in, core::Compute<T> cosine, core::Compute<T> sine,
                                     T* first, T* second) {
  const core::Compute<T> x = core::load(x_in), y = core::load(y_in);
  if constexpr (rounding == ProductRounding::fused) {
    core::store(core::fma(x, cosine, -(y * sine)), first);
    core::store(core::fma(x, sine, y * cosine), second);
  } else if constexpr (rounding == ProductRounding::to_data_type) {
    core::store(rounded<T>(x * cosine) - rounded<T>(y * sine), first);
    core::store(rounded<T>(y * cosine) + rounded<T>(x * sine), second);
  } else {
    core::store(x * cosine - y * sine, first);
    core::store(y * cosine + x * sine, second);
  }
}

}  // namespace posembed::rotary
