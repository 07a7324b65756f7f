// What CPU kernels that rotate share: a token's sines and cosines, computed once for all heads, and
// the rotation of a group of rows. Included by kernel_cpu.cpp files only; everything is internal to
// each of them, so that the compiler sees every call.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/vector.h"
#include "rotary/decay.h"
#include "rotary/kernel.h"
#include "rotary/rounding.h"

namespace posembed::rotary::POSEMBED_ISA {
namespace {

using core::Compute;
using core::FloatPair;
using core::Floats;
using core::lanes;
using core::TurnOf;

/// Tables are padded so that vectors never need a tail.
constexpr int64_t padded(int64_t pairs) {
  return (pairs + 2 * lanes - 1) / (2 * lanes) * (2 * lanes);
}
constexpr int64_t max_padded_pairs = padded(max_pairs);

/// Turns per position, in the order in which vectors hold the pairs.
template <typename T>
struct Turns {
  alignas(64) TurnOf<T> of_slot[max_padded_pairs];
  uint8_t axis_of_slot[max_padded_pairs];  // where positions have several axes
  double decay_of_slot[max_padded_pairs];  // xPos
  bool has_nan = false;                    // a learned frequency has no turn
};

/// Sine and cosine of a token, in the same order.
template <typename T>
struct Angles {
  alignas(64) Compute<T> cosine[max_padded_pairs];
  alignas(64) Compute<T> sine[max_padded_pairs];
  alignas(64) Compute<T> outer[max_padded_pairs];  // xPos: multiplies what has been rotated
};

/// A token: where its rows begin and whether it is rotated at all.
struct Token {
  int64_t batch;
  int64_t seq;
  bool rotated;
};

template <typename T, bool interleaved>
constexpr int64_t pair_of_slot(int64_t slot) {
  if constexpr (std::is_same_v<T, double>) return slot;
  constexpr int64_t block = interleaved ? lanes : 2 * lanes;
  const int64_t place = slot % block;
  return slot - place +
         (interleaved ? core::pair_of_lane<T>(place) : core::element_of_slot<T>(place));
}

/// `turn_of_pair` gives the turns of a pair.
template <typename T, bool interleaved, typename Source>
void place_turns(int64_t pairs, const Source& turn_of_pair, Turns<T>* turns) {
  constexpr int64_t block = std::is_same_v<T, double> ? 1 : 2 * lanes;
  const int64_t whole = pairs / block * block;
  for (int64_t i = 0; i < whole; i += block) {
    for (int64_t slot = 0; slot < block; ++slot) {
      turns->of_slot[i + slot] = turn_of_pair(i + pair_of_slot<T, interleaved>(slot));
    }
  }
  for (int64_t slot = whole; slot < padded(pairs); ++slot) {
    const int64_t pair = pair_of_slot<T, interleaved>(slot);
    turns->of_slot[slot] = pair < pairs ? turn_of_pair(pair) : TurnOf<T>{};
  }
}

/// Turns of the specification, or of learned frequencies.
template <typename T, bool interleaved>
void order_turns(const Arguments& arguments, Turns<T>* turns) {
  if (arguments.frequencies.data == nullptr) {
    const TurnOf<T>* of_pair = core::turns_of<T>(arguments);
    place_turns<T, interleaved>(
        arguments.pairs, [=](int64_t pair) { return of_pair[pair]; }, turns);
    return;
  }
  for (int64_t i = 0; i < arguments.pairs; ++i) {
    turns->has_nan |= !core::has_turn(read(arguments.frequencies, i));
  }
  const auto turn_of_pair = [&](int64_t pair) {
    const core::Turn128 turn = turn_of(arguments.frequencies, pair);
    if constexpr (std::is_same_v<T, double>) {
      return turn;
    } else {
      return core::round_to_turn64(turn);
    }
  };
  place_turns<T, interleaved>(arguments.pairs, turn_of_pair, turns);
}

template <typename T, bool interleaved>
void order_axes(const Arguments& arguments, Turns<T>* turns) {
  if (arguments.axes == 1) return;
  for (int64_t slot = 0; slot < padded(arguments.pairs); ++slot) {
    const int64_t pair = pair_of_slot<T, interleaved>(slot);
    turns->axis_of_slot[slot] = pair < arguments.pairs ? arguments.axis_of_pair[pair] : 0;
  }
}

template <typename T, bool interleaved>
void order_decay(const Arguments& arguments, Turns<T>* turns) {
  if (arguments.decay == nullptr) return;
  for (int64_t slot = 0; slot < padded(arguments.pairs); ++slot) {
    const int64_t pair = pair_of_slot<T, interleaved>(slot);
    turns->decay_of_slot[slot] = pair < arguments.pairs ? arguments.decay[pair] : 0.0;
  }
}

/// `position` tells the position of a slot.
template <typename T, typename Position>
void fill_angles(const Arguments& arguments, const Turns<T>& turns, const Position& position,
                 Angles<T>* angles) {
  const Compute<T> amplitude = static_cast<Compute<T>>(arguments.amplitude);
  const Compute<T> sine_amplitude = arguments.reverse ? -amplitude : amplitude;
  const int64_t slots = padded(arguments.pairs);
  for (int64_t begin = 0; begin < slots; begin += lanes) {
    for (int64_t slot = begin; slot < begin + lanes; ++slot) {
      Compute<T> sine, cosine;
      core::sincos_turn(core::phase(position(slot), turns.of_slot[slot]), &sine, &cosine);
      angles->cosine[slot] = cosine * amplitude;
      angles->sine[slot] = sine * sine_amplitude;
    }
  }
}

/// xPos: what the pairs of tensor `r` are multiplied by at their positions.
template <typename T, typename Position>
void apply_decay(const Arguments& arguments, const Turns<T>& turns, int64_t r,
                 const Position& position, Angles<T>* angles) {
  const double sign = r == 0 ? arguments.decay_sign : -arguments.decay_sign;
  for (int64_t slot = 0; slot < padded(arguments.pairs); ++slot) {
    const double distance = static_cast<double>(position(slot)) - arguments.decay_center;
    const Amplitude amplitude =
        amplitude_at<Compute<T>>(turns.decay_of_slot[slot], sign * distance);
    angles->cosine[slot] = static_cast<Compute<T>>(angles->cosine[slot] * amplitude.inner);
    angles->sine[slot] = static_cast<Compute<T>>(angles->sine[slot] * amplitude.inner);
    angles->outer[slot] = static_cast<Compute<T>>(amplitude.outer);
  }
}

/// A frequency that is not a number has no angle, and must not pass for one.
template <typename T, bool interleaved>
void spoil_angles(const Arguments& arguments, Angles<T>* angles) {
  for (int64_t slot = 0; slot < padded(arguments.pairs); ++slot) {
    const int64_t pair = pair_of_slot<T, interleaved>(slot);
    if (pair >= arguments.pairs || core::has_turn(read(arguments.frequencies, pair))) continue;
    angles->sine[slot] = angles->cosine[slot] = std::numeric_limits<Compute<T>>::quiet_NaN();
  }
}

/// What moves a rotated pair instead of what rotates it: see `tangent`.
template <typename T, bool interleaved>
void set_tangents(const Arguments& arguments, const Token& token, Angles<T>* angles) {
  for (int64_t slot = 0; slot < padded(arguments.pairs); ++slot) {
    const int64_t pair = pair_of_slot<T, interleaved>(slot);
    angles->cosine[slot] = angles->sine[slot] = 0;
    if (pair >= arguments.pairs) continue;
    const int64_t axis = arguments.axes == 1 ? 0 : arguments.axis_of_pair[pair];
    const auto position = static_cast<double>(position_of(arguments, token.batch, token.seq, axis));
    const double angle = position * read(arguments.frequencies, pair);
    angles->sine[slot] = static_cast<Compute<T>>(arguments.reverse ? -angle : angle);
  }
}

/// Rows of one token.
template <typename T>
struct RowGroup {
  const T* in;
  T* out;
  int64_t count;
  int64_t in_step, out_step;  // from row to row
};

template <typename Values>
POSEMBED_INLINE void rotate_pair(Values* first, Values* second, Values cosine, Values sine) {
  const Values x = *first, y = *second;
  *first = core::fma(x, cosine, -(y * sine));
  *second = core::fma(y, cosine, x * sine);
}

/// The hardware's prefetcher stops at the end of a page, and streamed stores leave it little to
/// see. Measured: 1 KiB ahead gains a tenth for 16-bit data that is streamed, and every distance
/// loses elsewhere.
template <bool streaming, typename T>
POSEMBED_INLINE void prefetch(const T* in) {
  constexpr uintptr_t ahead = 1024;
  if constexpr (streaming && sizeof(T) == 2) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(in) + ahead));
  }
}

/// A vector of floats, or one double: loops over those are left to the compiler.
template <typename Values, typename C>
POSEMBED_INLINE Values load_values(const C* in) {
  if constexpr (std::is_same_v<Values, C>) {
    return *in;
  } else {
    return core::load_vector<Values>(in);
  }
}

/// Sine and cosine read from memory where they are needed.
template <typename C>
struct AnglesInMemory {
  const C* cosines;
  const C* sines;

  template <typename T>
  explicit AnglesInMemory(const Angles<T>& angles) : cosines(angles.cosine), sines(angles.sine) {}
  template <typename Values>
  void rotate(Values* first, Values* second, int64_t slot) const {
    rotate_pair(first, second, load_values<Values>(cosines + slot),
                load_values<Values>(sines + slot));
  }
};

template <typename T>
AnglesInMemory(const Angles<T>&) -> AnglesInMemory<Compute<T>>;

/// xPos: what is rotated is multiplied once more.
struct DecayingAngles {
  AnglesInMemory<float> inner;
  const float* outers;

  template <typename T>
  explicit DecayingAngles(const Angles<T>& angles) : inner(angles), outers(angles.outer) {}
  void rotate(Floats* first, Floats* second, int64_t slot) const {
    inner.rotate(first, second, slot);
    const Floats outer = core::load_vector<Floats>(outers + slot);
    *first = *first * outer;
    *second = *second * outer;
  }
};

/// Sine and cosine loaded once for all rows; a number of pairs known to the compiler makes them
/// registers.
template <int64_t pairs>
struct AnglesInRegisters {
  Floats cosines[pairs / lanes], sines[pairs / lanes];

  template <typename T>
  explicit AnglesInRegisters(const Angles<T>& angles) {
    for (int64_t i = 0; i < pairs / lanes; ++i) {
      cosines[i] = core::load_vector<Floats>(angles.cosine + i * lanes);
      sines[i] = core::load_vector<Floats>(angles.sine + i * lanes);
    }
  }
  void rotate(Floats* first, Floats* second, int64_t slot) const {
    rotate_pair(first, second, cosines[slot / lanes], sines[slot / lanes]);
  }
};

/// Pairs (i, i + pairs): `blocks` times 2 * lanes of them from `i` on. Every load stands before the
/// first store: lines are asked for in the order of their addresses, which gains a twentieth.
template <int blocks, bool streaming, typename T, typename Source>
POSEMBED_INLINE void rotate_half_blocks(const T* in, T* out, const Source& angles, int64_t pairs,
                                        int64_t i) {
  constexpr int64_t block = 2 * lanes;
  FloatPair values[2 * blocks];  // first members of the pairs, then second members
  T* outs[2 * blocks];
  for (int b = 0; b < 2 * blocks; ++b) {
    const int64_t place = b < blocks ? i + b * block : pairs + i + (b - blocks) * block;
    prefetch<streaming>(in + place);
    values[b] = core::load_pair(in + place);
    outs[b] = out + place;
  }
  for (int b = 0; b < blocks; ++b) {
    FloatPair &x = values[b], &y = values[blocks + b];
    const int64_t slot = i + b * block;
    angles.rotate(&x.first, &y.first, slot);
    angles.rotate(&x.second, &y.second, slot + lanes);
  }
  core::store_pairs<streaming>(values, outs);
}

/// Pairs (i, i + pairs).
template <bool streaming, typename T, typename Source>
POSEMBED_INLINE void rotate_halves(const T* in, T* out, const Source& angles, int64_t pairs) {
  int64_t i = 0;
  for (; i + 4 * lanes <= pairs; i += 4 * lanes) {
    rotate_half_blocks<2, streaming>(in, out, angles, pairs, i);
  }
  for (; i + 2 * lanes <= pairs; i += 2 * lanes) {
    rotate_half_blocks<1, streaming>(in, out, angles, pairs, i);
  }
  if (const int64_t rest = pairs - i; rest > 0) {
    FloatPair x = core::load_pair(in + i, rest), y = core::load_pair(in + pairs + i, rest);
    angles.rotate(&x.first, &y.first, i);
    angles.rotate(&x.second, &y.second, i + lanes);
    core::store_pair(x, out + i, rest);
    core::store_pair(y, out + pairs + i, rest);
  }
}

/// Pairs (2i, 2i + 1): `blocks` times `lanes` of them from `i` on.
template <int blocks, bool streaming, typename T, typename Source>
POSEMBED_INLINE void rotate_neighbour_blocks(const T* in, T* out, const Source& angles, int64_t i) {
  FloatPair values[blocks];
  T* outs[blocks];
  for (int b = 0; b < blocks; ++b) {
    const int64_t slot = i + b * lanes;
    prefetch<streaming>(in + 2 * slot);
    FloatPair x = core::split_neighbours<T>(core::load_pair(in + 2 * slot));
    angles.rotate(&x.first, &x.second, slot);
    values[b] = core::join_neighbours<T>(x);
    outs[b] = out + 2 * slot;
  }
  core::store_pairs<streaming>(values, outs);
}

/// Pairs (2i, 2i + 1).
template <bool streaming, typename T, typename Source>
POSEMBED_INLINE void rotate_neighbours(const T* in, T* out, const Source& angles, int64_t pairs) {
  int64_t i = 0;
  if constexpr (sizeof(T) == 2) {
    for (; i + 4 * lanes <= pairs; i += 4 * lanes) {
      rotate_neighbour_blocks<4, streaming>(in, out, angles, i);
    }
  }
  for (; i + lanes <= pairs; i += lanes) {
    rotate_neighbour_blocks<1, streaming>(in, out, angles, i);
  }
  if (const int64_t rest = pairs - i; rest > 0) {
    FloatPair x = core::split_neighbours<T>(core::load_pair(in + 2 * i, 2 * rest));
    angles.rotate(&x.first, &x.second, i);
    core::store_pair(core::join_neighbours<T>(x), out + 2 * i, 2 * rest);
  }
}

template <bool streaming, typename Source>
POSEMBED_INLINE void rotate_halves(const double* in, double* out, const Source& angles,
                                   int64_t pairs) {
  for (int64_t i = 0; i < pairs; ++i) {
    double x = in[i], y = in[pairs + i];
    angles.rotate(&x, &y, i);
    out[i] = x;
    out[pairs + i] = y;
  }
}

template <bool streaming, typename Source>
POSEMBED_INLINE void rotate_neighbours(const double* in, double* out, const Source& angles,
                                       int64_t pairs) {
  for (int64_t i = 0; i < pairs; ++i) {
    double x = in[2 * i], y = in[2 * i + 1];
    angles.rotate(&x, &y, i);
    out[2 * i] = x;
    out[2 * i + 1] = y;
  }
}

/// Rotates the window of every row.
template <bool interleaved, bool streaming, typename T, typename Source>
POSEMBED_INLINE void rotate_each(const RowGroup<T>& rows, const Source& angles, int64_t pairs) {
  for (int64_t row = 0; row < rows.count; ++row) {
    const T* in = rows.in + row * rows.in_step;
    T* out = rows.out + row * rows.out_step;
    if constexpr (interleaved) {
      rotate_neighbours<streaming>(in, out, angles, pairs);
    } else {
      rotate_halves<streaming>(in, out, angles, pairs);
    }
  }
}

/// `fixed_pairs` is the number of pairs where the compiler shall know it, otherwise 0.
template <bool interleaved, bool streaming, int64_t fixed_pairs, typename T>
void rotate_group(const RowGroup<T>& group, const Angles<T>& angles, int64_t pairs) {
  const RowGroup<T> rows = group;  // a copy that no store can change
  if constexpr (fixed_pairs > 0) {
    rotate_each<interleaved, streaming>(rows, AnglesInRegisters<fixed_pairs>(angles), fixed_pairs);
  } else {
    rotate_each<interleaved, streaming>(rows, AnglesInMemory(angles), pairs);
  }
}

/// xPos.
template <bool interleaved, typename T>
void rotate_decaying_group(const RowGroup<T>& group, const Angles<T>& angles, int64_t pairs) {
  const RowGroup<T> rows = group;
  if constexpr (std::is_same_v<T, double>) {
    rotate_each<interleaved, false>(rows, AnglesInMemory(angles),
                                    pairs);  // an outer factor is for floats alone
  } else {
    rotate_each<interleaved, false>(rows, DecayingAngles(angles), pairs);
  }
}

/// By tables.
template <bool interleaved, bool round_products, typename T>
POSEMBED_IN_STEPS void rotate_group_in_steps(const RowGroup<T>& group, const Angles<T>& angles,
                                             int64_t pairs) {
  const RowGroup<T> rows = group;
  for (int64_t row = 0; row < rows.count; ++row) {
    const T* in = rows.in + row * rows.in_step;
    T* out = rows.out + row * rows.out_step;
    for (int64_t i = 0; i < pairs; ++i) {
      const int64_t first = interleaved ? 2 * i : i, second = interleaved ? first + 1 : i + pairs;
      rotate_in_steps<round_products>(in[first], in[second], angles.cosine[i], angles.sine[i],
                                      out + first, out + second);
    }
  }
}

template <typename T>
void copy(const T* in, T* out, int64_t count) {
  memcpy(out, in, static_cast<size_t>(count) * sizeof(T));
}

/// Copies elements [begin, end) of every row.
template <typename T>
void copy_group(const RowGroup<T>& rows, int64_t begin, int64_t end) {
  if (begin >= end || rows.in == rows.out) return;
  for (int64_t row = 0; row < rows.count; ++row) {
    copy(rows.in + row * rows.in_step + begin, rows.out + row * rows.out_step + begin, end - begin);
  }
}

/// Reads the angles of a token, which are rotated in the order of the pairs.
template <typename T>
void read_table(const Arguments& arguments, const Token& token, Angles<T>* angles) {
  const int64_t row =
      token.batch * arguments.table_stride[0] + token.seq * arguments.table_stride[1];
  for (int64_t pair = 0; pair < arguments.pairs; ++pair) {
    angles->cosine[pair] = arguments.cosines[row + pair];
    angles->sine[pair] = arguments.sines[row + pair];
  }
}

/// Angles of a token in tensor `r` at the positions of its slots.
template <typename T, typename Position>
void begin_rotation(const Arguments& arguments, const Turns<T>& turns, const Token& token,
                    const Position& position, int64_t r, Angles<T>* angles) {
  if (arguments.cosines != nullptr) return read_table(arguments, token, angles);
  fill_angles<T>(arguments, turns, position, angles);
  if (arguments.decay != nullptr) apply_decay<T>(arguments, turns, r, position, angles);
}

/// Angles of a token in tensor `r`; whether it is rotated at all.
template <typename T>
bool begin_token(const Arguments& arguments, const Turns<T>& turns, const Token& token,
                 Angles<T>* angles, int64_t r = 0) {
  if (arguments.axes == 1) {
    const int64_t position = position_of(arguments, token.batch, token.seq, 0);
    if (position == -1) return false;
    begin_rotation<T>(
        arguments, turns, token, [=](int64_t) { return position; }, r, angles);
    return true;
  }
  int64_t of_axis[max_axes];
  for (int64_t axis = 0; axis < arguments.axes; ++axis) {
    of_axis[axis] = position_of(arguments, token.batch, token.seq, axis);
    if (of_axis[axis] == -1) return false;
  }
  const auto position = [&](int64_t slot) { return of_axis[turns.axis_of_slot[slot]]; };
  begin_rotation<T>(arguments, turns, token, position, r, angles);
  return true;
}

template <typename T>
using RotateGroup = void (*)(const RowGroup<T>&, const Angles<T>&, int64_t);

template <typename T, bool interleaved, bool streaming>
RotateGroup<T> choose_rotation(int64_t pairs) {
  if constexpr (!std::is_same_v<T, double>) {
    if (pairs == 32) return rotate_group<interleaved, streaming, 32, T>;
    if (pairs == 64) return rotate_group<interleaved, streaming, 64, T>;
    if (pairs == 128) return rotate_group<interleaved, streaming, 128, T>;
  }
  return rotate_group<interleaved, streaming, 0, T>;
}

/// Outputs from this size on are written past the caches: they would not stay in them.
constexpr int64_t streaming_bytes = int64_t{8} << 20;

template <typename T>
bool in_whole_lines(int64_t elements) {
  return elements * static_cast<int64_t>(sizeof(T)) % 64 == 0;
}

/// Whether `elements` are worth writing past the caches to rows at `out`, all of them aligned.
template <typename T>
bool can_stream(int64_t elements, const void* out, const int64_t (&stride)[3]) {
  return elements * static_cast<int64_t>(sizeof(T)) >= streaming_bytes &&
         reinterpret_cast<uintptr_t>(out) % 64 == 0 && in_whole_lines<T>(stride[0]) &&
         in_whole_lines<T>(stride[1]) && in_whole_lines<T>(stride[2]);
}

/// Whether every vector of the rotated window is aligned where rows are.
template <typename T>
bool is_window_aligned(const Arguments& arguments, const Rows& rows) {
  return in_whole_lines<T>(window_start(arguments, rows)) && in_whole_lines<T>(arguments.pairs);
}

template <typename T>
bool can_stream(const Arguments& arguments, const Rows& rows) {
  const int64_t elements = arguments.batch * arguments.seq * rows.heads * row_dim(arguments, rows);
  return rows.in != rows.out && is_window_aligned<T>(arguments, rows) &&
         can_stream<T>(elements, rows.out, rows.out_stride);
}

/// Rotates the windows of `group`, which are rows of `rows`, and copies what lies outside them; or
/// copies all where the token stays as it is. A tangent has nothing outside.
template <typename T>
void rotate_rows(const Arguments& arguments, const Rows& rows, const Token& token,
                 RotateGroup<T> rotation, const Angles<T>& angles, RowGroup<T> group) {
  const int64_t dim = row_dim(arguments, rows), start = window_start(arguments, rows);
  if (!arguments.tangent) {
    const int64_t window = token.rotated ? start : dim;
    copy_group(group, 0, window);
    copy_group(group, window + 2 * arguments.pairs, dim);
  }
  if (!token.rotated) return;
  group.in += start;
  group.out += start;
  rotation(group, angles, arguments.pairs);
}

}  // namespace
}  // namespace posembed::rotary::POSEMBED_ISA
