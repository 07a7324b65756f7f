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

/// What turns a pair: cosine and sine for each of its two components. They differ only in tables
/// that have a value for each component.
template <typename C>
struct PairAngle {
  C cosine[2], sine[2];
};

template <ProductRounding rounding, typename T>
POSEMBED_INLINE void rotate_in_steps(T x_in, T y_in, const PairAngle<core::Compute<T>>& angle,
                                     T* first, T* second) {
  const core::Compute<T> x = core::load(x_in), y = core::load(y_in);
  const auto& [cosine, sine] = angle;
  if constexpr (rounding == ProductRounding::fused) {
    core::store(core::fma(x, cosine[0], -(y * sine[0])), first);
    core::store(core::fma(x, sine[1], y * cosine[1]), second);
  } else if constexpr (rounding == ProductRounding::to_data_type) {
    core::store(rounded<T>(x * cosine[0]) - rounded<T>(y * sine[0]), first);
    core::store(rounded<T>(y * cosine[1]) + rounded<T>(x * sine[1]), second);
  } else {
    core::store(x * cosine[0] - y * sine[0], first);
    core::store(y * cosine[1] + x * sine[1], second);
  }
}

}  // namespace posembed::rotary
