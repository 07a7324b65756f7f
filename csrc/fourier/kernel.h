// The Fourier kernel: sines and cosines of sums of coordinates times frequencies, written or added
// to rows. Tancik et al., "Fourier Features Let Networks Learn High Frequency Functions in Low
// Dimensional Domains", arXiv:2006.10739.
#pragma once

#include <cstdint>

#include "core/cpu_kernel.h"
#include "core/cuda_launch.h"
#include "core/scalar.h"
#include "fourier/angle.h"

namespace posembed::fourier {

/// All tensors are contiguous. Item row * groups + group has `count` angles, each a sum of `terms`
/// products.
struct Arguments {
  core::PositionView coordinates;  // [rows, terms], or [rows, groups] if axes are apart
  core::PositionView frequencies;  // floating [terms, count]
  core::PositionView phases;       // floating [count], in radians; data may be null
  double unit = 0;                 // of frequencies, in turns; 0: radians
  const void* in = nullptr;        // [rows, columns], to which values are added; may be null
  void* out = nullptr;             // [rows, columns]
  core::Scalar scalar = core::Scalar::float32;
  int64_t rows = 0, columns = 0, terms = 0, count = 0;
  int64_t groups = 1;  // axes that are apart: all terms multiply the coordinate of one
  bool apart = false;
  int64_t group_step = 0, count_step = 0;  // in columns
  int64_t sine = 0, cosine = 0;            // columns of the first sine and cosine; -1: none
  int64_t derivative = 0;                  // its order: each adds a quarter turn
};

/// The start of an angle: its phase and the quarter turns, and 1, or NaN without a phase.
struct Start {
  uint64_t turns = 0;
  float factor = 1;
};

POSEMBED_INLINE Start start_of(const Arguments& arguments, int64_t index) {
  Start start{static_cast<uint64_t>(arguments.derivative) << 62, 1};
  if (arguments.phases.data == nullptr) return start;
  const double phase =
      core::read_floating<double>(arguments.phases.data, arguments.phases.scalar, index);
  if (!core::has_turn(phase)) return {0, NAN};
  start.turns += core::round_to_turn64(core::turn_from_radians(phase));
  return start;
}

POSEMBED_INLINE Turns turns_at(const Arguments& arguments, int64_t term, int64_t index) {
  const core::PositionView& all = arguments.frequencies;
  const int64_t place = term * arguments.count + index;
  return turns_of(core::read_floating<double>(all.data, all.scalar, place), arguments.unit);
}

/// The coordinate that `term` of an item multiplies.
POSEMBED_INLINE Coordinate coordinate_at(const Arguments& arguments, int64_t item, int64_t term) {
  return read_coordinate(arguments.coordinates,
                         arguments.apart ? item : item * arguments.terms + term);
}

/// The column of an item's first angle in `out`.
POSEMBED_INLINE int64_t first_column(const Arguments& arguments, int64_t item) {
  return item / arguments.groups * arguments.columns +
         item % arguments.groups * arguments.group_step;
}

/// Sine or cosine to its column.
template <typename T>
POSEMBED_INLINE void put(const Arguments& arguments, core::Compute<T> value, int64_t column) {
  if (arguments.in != nullptr) value += core::load(static_cast<const T*>(arguments.in)[column]);
  core::store(value, static_cast<T*>(arguments.out) + column);
}

/// Sine and cosine of an angle in units of 2^-64 turns.
POSEMBED_INLINE void sincos(uint64_t turns, float* sine, float* cosine) {
  core::sincos_turn(turns, sine, cosine);
}

POSEMBED_INLINE void sincos(uint64_t turns, double* sine, double* cosine) {
  core::sincos_turn(core::Turn128{turns, 0}, sine, cosine);
}

/// Computes items [begin, end).
POSEMBED_CPU_KERNEL(encode, void(const Arguments& arguments, int64_t begin, int64_t end));

/// Computes all items on `stream`. Returns nullptr, or the text of a CUDA error.
const char* encode_cuda(const Arguments& arguments, core::CudaStream stream);

}  // namespace posembed::fourier
