// The Fourier kernel: sines and cosines of sums of coordinates times frequencies, written or added
// to rows. Tancik et al., "Fourier Features Let Networks Learn High Frequency Functions in Low
// Dimensional Domains", arXiv:2006.10739.
#pragma once

#include <cstdint>

#include "core/cuda_launch.h"
#include "core/instruction_set.h"
#include "core/macros.h"
#include "core/position.h"
#include "core/scalar.h"
#include "core/turn.h"

namespace posembed::fourier {

// ------------------------------------------------------------------------------------------- angle
// Exact angles of coordinates times frequencies. A frequency is a fixed-point number of turns, 64
// bits before the point and 128 after it; a coordinate is a sum of 32-bit numbers times powers of
// two. Each product is shifted and wrapped modulo one turn, so sums over axes are exact too.

/// Turns of a frequency: whole + high * 2^-64 + low * 2^-128.
struct Turns {
  uint64_t low = 0, high = 0;
  int64_t whole = 0;
  bool valid = false;  // the frequency is finite and below max_frequency
};

/// The largest magnitude of frequencies: the whole turns of more could be wrong by one.
inline constexpr double max_frequency = 0x1p50;

/// `turns` as an exact number, its magnitude truncated to a multiple of 2^-128.
POSEMBED_INLINE Turns fixed_point(double turns) {
  const double size = fabs(turns), whole = floor(size), scaled = (size - whole) * 0x1p64;
  Turns result;
  result.whole = static_cast<int64_t>(whole);
  result.high = static_cast<uint64_t>(scaled);
  result.low = static_cast<uint64_t>((scaled - static_cast<double>(result.high)) * 0x1p64);
  result.valid = true;
  if (turns >= 0) return result;
  const uint64_t high = ~result.high + (result.low == 0);
  result.whole = ~result.whole + (result.low == 0 && high == 0);
  return {uint64_t{0} - result.low, high, result.whole, true};
}

/// @param unit  turns: 1, 0.5, or 0 for radians
POSEMBED_INLINE Turns turns_of(double frequency, double unit) {
  if (!(fabs(frequency) < max_frequency)) return {};
  if (unit != 0) return fixed_point(frequency * unit);
  const core::Turn128 turn = core::turn_from_radians(frequency);
  return {turn.low, turn.high, core::whole_turns(frequency, turn), true};
}

/// A summand of a coordinate: ±factor * 2^exponent, where factor has 32 bits.
struct Limb {
  uint64_t factor = 0;
  int exponent = 0;
  bool negative = false;
};

/// A coordinate as the sum of two limbs, of which either may be 0.
struct Coordinate {
  Limb limbs[2];
  bool valid = true;  // finite, and below 2^63
};

POSEMBED_INLINE Coordinate coordinate_of(int64_t number) {
  const bool negative = number < 0;
  const uint64_t bits = static_cast<uint64_t>(number), size = negative ? uint64_t{0} - bits : bits;
  return {{{size >> 32, 32, negative}, {size & 0xffffffffu, 0, negative}}, true};
}

POSEMBED_INLINE Coordinate coordinate_of(double number) {
  constexpr int low_bits = 21;  // of the mantissa's 53; a float32 has none of them
  if (!(fabs(number) < 0x1p63)) return {{}, false};
  uint64_t bits;
  memcpy(&bits, &number, sizeof bits);
  const int biased = static_cast<int>(bits >> 52 & 0x7ff);
  const uint64_t fraction = bits & 0xfffffffffffffu;
  const uint64_t mantissa = biased == 0 ? fraction : fraction | uint64_t{1} << 52;
  const int exponent = (biased == 0 ? 1 : biased) - 1075;
  const bool negative = bits >> 63 != 0;
  return {{{mantissa >> low_bits, exponent + low_bits, negative},
           {mantissa & ((1u << low_bits) - 1), exponent, negative}},
          true};
}

POSEMBED_INLINE Coordinate read_coordinate(const core::PositionView& view, int64_t index) {
  if (!view.floating)
    return coordinate_of(core::read(core::IndexView{view.data, view.index}, index));
  return coordinate_of(core::read_floating<double>(view.data, view.scalar, index));
}

/// The words of Turns between zeros and signs, from the least significant one on.
inline constexpr int words = 6;

POSEMBED_INLINE uint64_t word_of(const Turns& turns, int index) {
  if (index == 1) return turns.low;
  if (index == 2) return turns.high;
  if (index == 3) return static_cast<uint64_t>(turns.whole);
  return index > 3 && turns.whole < 0 ? ~uint64_t{0} : 0;
}

/// The word with the highest bit of the fraction of turns * 2^exponent; from there, the fraction is
/// exponent % 64 bits further right. Not below `words`: the limb is too small to count.
POSEMBED_INLINE int highest_word(const Limb& limb) { return 2 - (limb.exponent >> 6); }

/// A limb times turns, in units of 2^-64 turns, from three words of which the first is the highest;
/// `wide` rounds by less than two units, otherwise the error is below 2^-32 turns.
template <bool wide>
POSEMBED_INLINE uint64_t angle(const Limb& limb, uint64_t first, uint64_t second, uint64_t third) {
  const int left = limb.exponent & 63, right = 63 - left;
  uint64_t product = (first << left | second >> 1 >> right) * limb.factor;
  if (wide) product += ((second << left | third >> 1 >> right) >> 32) * limb.factor >> 32;
  const uint64_t sign = limb.negative ? ~uint64_t{0} : 0;
  return (product ^ sign) - sign;
}

// ------------------------------------------------------------------------------------------ kernel

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
