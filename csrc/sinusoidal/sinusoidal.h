// The sinusoidal kernel: adds position encodings to rows, or writes them, without a table. Vaswani
// et al., "Attention Is All You Need", 2017, section 3.5.
#pragma once

#include <cstdint>
#include <vector>

#include "core/cuda_launch.h"
#include "core/double_double.h"
#include "core/instruction_set.h"
#include "core/macros.h"
#include "core/position.h"
#include "core/scalar.h"
#include "core/turn.h"

namespace posembed::sinusoidal {

// ---------------------------------------------------------------------------------------- sinusoid
// Shared by all sinusoidal kernels: the column of each sine and cosine, and the phase of a pair at
// an integer or fractional position. Vaswani et al., "Attention Is All You Need", 2017, section
// 3.5.

/// The columns of sines and cosines. Interleaved: pair i in columns 2i and 2i + 1; the last pair of
/// an odd row has one column. In halves: pair i in columns i and `half` + i.
struct Layout {
  int64_t columns = 0;  // embedding_dim
  int64_t filled = 0;   // columns from here on are zero
  int64_t half = 0;     // start of the second half
  bool interleaved = true;
  bool cos_first = false;
};

/// The numbers that define an encoding, as kernels read them.
struct Sinusoid {
  Layout layout;
  int64_t pairs = 0;
  const core::Turn64* turns = nullptr;        // [pairs], host memory: turns per position
  const core::Turn128* wide_turns = nullptr;  // the same to 128 bits, for float64 data
  double scale = 1.0;                         // multiplies the values
  const void* learned_scale = nullptr;        // multiplies them too: one number, on the device
  core::Scalar learned_type = core::Scalar::float32;
  int64_t order = 0;  // order of the derivative by the position
  /// The index of position 0 in the series. If it is above 0, position -1 is padding, whose
  /// encoding is zero.
  int64_t first = 0;
  int64_t position_scale = 1;  // multiplies positions, before `first` is added
};

using core::Position;
using core::PositionView;
using core::TurnOf;
using core::turns_of;

/// The position of the row at `seq`; `index` is its index in `view`.
POSEMBED_INLINE Position position_of(const PositionView& view, int64_t offset, int64_t seq,
                                     int64_t index) {
  return view.data == nullptr ? Position{offset + seq, 0, 1.0} : read(view, index);
}

/// The index of a position in the series; padding has the scale 0.
/// @param scaled  whether position_scale may be other than 1
POSEMBED_INLINE Position placed(const Sinusoid& sinusoid, Position position, bool scaled = true) {
  const auto first = static_cast<uint64_t>(sinusoid.first);
  const auto times = static_cast<uint64_t>(sinusoid.position_scale);
  if (first > 0 && position.whole == -1 && position.part == 0) position.scale = 0.0;
  if (scaled && times > 1) {
    const uint64_t carried = core::multiply_high(position.part, times);
    position.whole = static_cast<int64_t>(static_cast<uint64_t>(position.whole) * times + carried);
    position.part *= times;
  }
  position.whole = static_cast<int64_t>(static_cast<uint64_t>(position.whole) + first);
  return position;
}

/// `turn` plus a quarter turn for each derivative: sin' = cos, cos' = -sin.
POSEMBED_INLINE core::Turn64 derived(core::Turn64 turn, int64_t order) {
  return turn + (static_cast<uint64_t>(order) << 62);
}

POSEMBED_INLINE core::Turn128 derived(core::Turn128 turn, int64_t order) {
  return {derived(turn.high, order), turn.low};
}

/// The factor of every value.
POSEMBED_INLINE double scale_of(const Sinusoid& sinusoid) {
  if (sinusoid.learned_scale == nullptr) return sinusoid.scale;
  return sinusoid.scale *
         core::read_floating<double>(sinusoid.learned_scale, sinusoid.learned_type, 0);
}

/// The factor of a pair's sine and cosine: the scale, times the frequency for each derivative.
POSEMBED_INLINE double amplitude(double scale, int64_t order, core::Turn128 turn) {
  double result = scale;
  for (int64_t i = 0; i < order; ++i) {
    const double turns =
        static_cast<double>(turn.high) * 0x1p-64 + static_cast<double>(turn.low) * 0x1p-128;
    result *= 6.283185307179586 * turns;
  }
  return result;
}

POSEMBED_INLINE double amplitude(double scale, int64_t order, core::Turn64 turn) {
  return amplitude(scale, order, core::Turn128{turn, 0});
}

/// Sine and cosine of a pair, or their derivative.
template <typename C, typename Turn>
POSEMBED_INLINE void sincos_at(const Position& position, Turn turn, int64_t order, C amplitude,
                               C* sine, C* cosine) {
  C s, c;
  core::sincos_turn(derived(core::phase(position, turn), order), &s, &c);
  *sine = s * amplitude;
  *cosine = c * amplitude;
}

/// Sines and cosines of `count` pairs at a whole position, in a loop that compilers can vectorise.
template <typename C, typename Turn>
POSEMBED_INLINE void fill_waves(int64_t position, const Turn* turns, int64_t count, C amplitude,
                                C* sines, C* cosines) {
  for (int64_t i = 0; i < count; ++i) {
    C sine, cosine;
    core::sincos_turn(core::phase(position, turns[i]), &sine, &cosine);
    sines[i] = sine * amplitude;
    cosines[i] = cosine * amplitude;
  }
}

/// The columns of a pair.
POSEMBED_INLINE int64_t first_column(const Layout& layout, int64_t pair) {
  return layout.interleaved ? 2 * pair : pair;
}

POSEMBED_INLINE int64_t second_column(const Layout& layout, int64_t pair) {
  return layout.interleaved ? 2 * pair + 1 : layout.half + pair;
}

// ------------------------------------------------------------------------------------------ kernel

/// Rows [batch, seq, columns] with a contiguous last dimension: out = in + encoding, or out =
/// encoding if `in` is null.
struct Arguments {
  Sinusoid sinusoid;
  const void* in = nullptr;
  void* out = nullptr;
  core::Scalar scalar = core::Scalar::float32;
  int64_t batch = 0;
  int64_t seq = 0;
  int64_t in_stride[2] = {0, 0};  // batch, seq; in elements
  int64_t out_stride[2] = {0, 0};
  PositionView positions;               // data == nullptr: offset, offset + 1, …
  int64_t position_stride[2] = {0, 0};  // batch, seq; in elements
  int64_t offset = 0;
  int64_t groups = 1;  // of sequences that share positions; each group computes its encodings
};

/// The number of groups. A group's sequences are consecutive and share every encoding.
inline int64_t groups_of(const Arguments& arguments) {
  return arguments.position_stride[0] == 0 ? arguments.groups : arguments.batch;
}

/// The number of encodings to compute.
inline int64_t encodings(const Arguments& arguments) {
  return groups_of(arguments) * arguments.seq;
}

/// Encodings are numbered by group * seq + seq index; applies encodings [begin, end) to their rows.
POSEMBED_CPU_KERNEL(encode, void(const Arguments& arguments, int64_t begin, int64_t end));

/// Processes all rows on `stream`. Returns nullptr, or the text of a CUDA error.
const char* encode_cuda(const Arguments& arguments, core::CudaStream stream);

// ------------------------------------------------------------------------------------- frequencies
// Frequencies and column layouts of sinusoidal encodings, as in the programs that models were
// trained with.

enum class Preset : int8_t {
  /// The paper's layout: interleaved, frequency base^(-2i / dim). An odd dim ends with a sine.
  vaswani,
  /// Marian, Pegasus: the same frequencies in halves. An odd dim has one more sine column.
  marian,
  /// tensor2tensor, "fairseq" and diffusion models ("ddpm"): halves, frequency
  /// base^(-i / (dim / 2 - 1)), from 1 to 1 / base inclusive. An odd dim ends with a zero.
  tensor2tensor,
};

/// The layout of a preset.
Layout layout_of(Preset preset, int64_t embedding_dim, bool cos_first);

/// The number of pairs in a row; a last column without a partner counts as a pair.
int64_t pairs_of(const Layout& layout);

/// The divisor of a pair's index in the exponent: dim / 2 - shift.
double divisor_of(Preset preset, int64_t embedding_dim, double shift);

/// base^(-i / divisor) for i in [0, pairs), in radians per position. The first is 1 for any
/// divisor.
std::vector<core::DoubleDouble> frequencies(double base, double divisor, int64_t pairs);

}  // namespace posembed::sinusoidal
