// Tokens in the order of CPU kernels, and the sines and cosines of their angles. Included only by
// *_cpu.cpp files; everything is internal to each.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/vector.h"
#include "rotary/rotary.h"

namespace posembed::rotary::POSEMBED_ISA {
namespace {

/// A token's indices, whether it is rotated at all, and whether by tables with different values for
/// the two components of a pair.
struct Token {
  int64_t batch;
  int64_t seq;
  bool rotated;
  bool apart = false;
};

/// Numbers tokens 0 to batch * seq - 1 in memory order, because other orders are slow: in [seq,
/// batch, heads, head_dim] the tokens of one `seq` are neighbours. Sums over tokens do not follow
/// this order, so their bits are the same for any strides.
class TokenOrder {
 public:
  explicit TokenOrder(const Arguments& arguments)
      : seq_first(is_seq_first(arguments.views[0]) && arguments.batch > 1),
        inner_(seq_first ? arguments.batch : arguments.seq) {}

  Token token(int64_t number) const {
    const int64_t outer = number / inner_, inner = number % inner_;
    return seq_first ? Token{inner, outer, false} : Token{outer, inner, false};
  }

  /// Moves to the next token. Takes numbers, which stay in registers, because reading a Token just
  /// after it was written, with another access width, waits for all earlier stores.
  void advance(int64_t* batch, int64_t* seq) const {
    if (seq_first) {
      step(batch, seq);
    } else {
      step(seq, batch);
    }
  }

  const bool seq_first;

 private:
  static bool is_seq_first(const HeadView& view) {
    return view.in_stride[0] < view.in_stride[1] && view.out_stride[0] <= view.out_stride[1];
  }

  void step(int64_t* inner, int64_t* outer) const {
    if (++*inner < inner_) return;
    *inner = 0;
    ++*outer;
  }

  int64_t inner_;
};

/// Whether the tokens of a head are neighbours in memory ([batch, heads, seq, head_dim]). Each head
/// is then a separate memory stream, and tokens are processed in tiles of a few heads.
inline bool is_head_major(const HeadView& view) {
  return view.heads > 1 && view.in_stride[1] < view.in_stride[2];
}

/// The offset of the row of a token's head; strides are those of batch, token and head.
inline int64_t offset_of(const Token& token, int64_t head, const int64_t* stride) {
  return token.batch * stride[0] + token.seq * stride[1] + head * stride[2];
}

// ------------------------------------------------------------------------------------------ angles
// A token's sines and cosines, in the order in which vectors hold the pairs, computed once for all
// its heads.

using core::Compute;
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
  int64_t whole_of_slot[max_padded_pairs];  // whole turns, for positions with fractions
  uint8_t axis_of_slot[max_padded_pairs];   // for positions with several axes
  double decay_of_slot[max_padded_pairs];   // xPos
  uint16_t pair_of_slot[max_padded_pairs];  // for angles read from tables
  bool has_nan = false;                     // whether a learned frequency has no turn
};

/// Padding between arrays. At power-of-two distances, the angles of a tile's tokens would share a
/// few sets of the L1 cache and evict each other.
constexpr int64_t array_padding = 64;

}  // namespace

/// Sine and cosine of a token, in the same order.
template <typename T>
struct Angles {
  alignas(64) Compute<T> cosine[max_padded_pairs + array_padding];
  alignas(64) Compute<T> sine[max_padded_pairs + array_padding];
  alignas(64) Compute<T> outer[max_padded_pairs];  // xPos: multiplies the rotated pair
};

namespace {

template <typename T, bool interleaved>
constexpr int64_t pair_of_slot(int64_t slot) {
  if constexpr (std::is_same_v<T, double>) return slot;
  constexpr int64_t block = interleaved ? lanes : 2 * lanes;
  const int64_t index = slot % block;
  return slot - index +
         (interleaved ? core::pair_of_lane<T>(index) : core::element_of_slot<T>(index));
}

/// Fills the turns of all slots. Unrolled, so that indices within a block are constants: a loop
/// would take a noticeable part of a call for one token.
template <typename T, bool interleaved>
void place_turns(int64_t pairs, const TurnOf<T>* of_pair, Turns<T>* turns) {
  constexpr int64_t block = std::is_same_v<T, double> ? 1 : 2 * lanes;
  const int64_t whole = pairs / block * block;
  for (int64_t i = 0; i < whole; i += block) {
#pragma GCC unroll 32
    for (int64_t slot = 0; slot < block; ++slot) {
      turns->of_slot[i + slot] = of_pair[i + pair_of_slot<T, interleaved>(slot)];
    }
  }
  for (int64_t slot = whole; slot < padded(pairs); ++slot) {
    const int64_t pair = pair_of_slot<T, interleaved>(slot);
    turns->of_slot[slot] = pair < pairs ? of_pair[pair] : TurnOf<T>{};
  }
}

/// Turns of learned frequencies.
template <typename T, bool interleaved>
void order_learned_turns(const Arguments& arguments, Turns<T>* turns) {
  TurnOf<T> of_pair[max_pairs];
  for (int64_t i = 0; i < arguments.pairs; ++i) {
    turns->has_nan |= !core::has_turn(read(arguments.frequencies, i));
    const core::Turn128 turn = turn_of(arguments.frequencies, i);
    if constexpr (std::is_same_v<T, double>) {
      of_pair[i] = turn;
    } else {
      of_pair[i] = core::round_to_turn64(turn);
    }
  }
  place_turns<T, interleaved>(arguments.pairs, of_pair, turns);
}

/// Whole turns of all slots.
template <typename T, bool interleaved>
void order_whole_turns(const Arguments& arguments, Turns<T>* turns) {
  if (!arguments.positions.floating) return;
  for (int64_t slot = 0; slot < padded(arguments.pairs); ++slot) {
    const int64_t pair = pair_of_slot<T, interleaved>(slot);
    turns->whole_of_slot[slot] = 0;
    if (pair >= arguments.pairs) continue;
    const bool learned = arguments.frequencies.data != nullptr;
    const double radians =
        learned ? read(arguments.frequencies, pair) : arguments.radians[pair].high;
    if (!core::has_turn(radians)) continue;
    turns->whole_of_slot[slot] = core::whole_turns(radians, turns->of_slot[slot]);
  }
}

/// Puts the values of pairs into the order of slots, and `rest` behind the last pair.
template <typename T, bool interleaved, typename Value>
void order_pairs(int64_t pairs, const Value* of_pair, Value rest, Value* of_slot) {
  for (int64_t slot = 0; slot < padded(pairs); ++slot) {
    const int64_t pair = pair_of_slot<T, interleaved>(slot);
    of_slot[slot] = pair < pairs ? of_pair[pair] : rest;
  }
}

/// The pair of a slot. Slots beyond the last pair repeat that pair.
template <typename T, bool interleaved>
void order_table(const Arguments& arguments, Turns<T>* turns) {
  for (int64_t slot = 0; slot < padded(arguments.pairs); ++slot) {
    const int64_t pair = pair_of_slot<T, interleaved>(slot);
    turns->pair_of_slot[slot] = static_cast<uint16_t>(std::min(pair, arguments.pairs - 1));
  }
}

/// Turns of the specification, or of learned frequencies, with the axes of their positions.
template <typename T, bool interleaved>
void order_turns(const Arguments& arguments, Turns<T>* turns) {
  if (arguments.cosines != nullptr) {
    order_table<T, interleaved>(arguments, turns);
  } else if (arguments.frequencies.data != nullptr) {
    order_learned_turns<T, interleaved>(arguments, turns);
  } else {
    place_turns<T, interleaved>(arguments.pairs, core::turns_of<T>(arguments), turns);
  }
  order_whole_turns<T, interleaved>(arguments, turns);
  if (arguments.axis_of_pair != nullptr) {
    order_pairs<T, interleaved>(arguments.pairs, arguments.axis_of_pair, uint8_t{0},
                                turns->axis_of_slot);
  }
}

template <typename T, bool interleaved>
void order_decay(const Arguments& arguments, Turns<T>* turns) {
  if (arguments.decay == nullptr) return;
  order_pairs<T, interleaved>(arguments.pairs, arguments.decay, 0.0, turns->decay_of_slot);
}

template <typename T>
TurnOf<T> phase_of(int64_t position, const Turns<T>& turns, int64_t slot) {
  return core::phase(position, turns.of_slot[slot]);
}

template <typename T>
TurnOf<T> phase_of(const core::Position& position, const Turns<T>& turns, int64_t slot) {
  return core::phase(position, turns.of_slot[slot], turns.whole_of_slot[slot]);
}

/// Fills sine and cosine; `phase` returns the angle of a slot.
template <typename T, typename Phase>
void fill_angles(const Arguments& arguments, const Phase& phase, Angles<T>* angles) {
  const Compute<T> amplitude = static_cast<Compute<T>>(arguments.amplitude);
  const Compute<T> sine_amplitude = arguments.reverse ? -amplitude : amplitude;
  const int64_t slots = padded(arguments.pairs);
  for (int64_t begin = 0; begin < slots; begin += lanes) {
    for (int64_t slot = begin; slot < begin + lanes; ++slot) {
      Compute<T> sine, cosine;
      core::sincos_turn(phase(slot), &sine, &cosine);
      angles->cosine[slot] = cosine * amplitude;
      angles->sine[slot] = sine * sine_amplitude;
    }
  }
}

/// xPos: the factors of the pairs of tensor `r` at their positions.
template <typename T, typename Position>
void apply_decay(const Arguments& arguments, const Turns<T>& turns, int64_t r,
                 const Position& position, Angles<T>* angles) {
  const double sign = r == 0 ? arguments.decay_sign : -arguments.decay_sign;
  for (int64_t slot = 0; slot < padded(arguments.pairs); ++slot) {
    const double distance = core::to_double(position(slot)) - arguments.decay_center;
    const Amplitude amplitude =
        amplitude_at<Compute<T>>(turns.decay_of_slot[slot], sign * distance);
    angles->cosine[slot] = static_cast<Compute<T>>(angles->cosine[slot] * amplitude.inner);
    angles->sine[slot] = static_cast<Compute<T>>(angles->sine[slot] * amplitude.inner);
    angles->outer[slot] = static_cast<Compute<T>>(amplitude.outer);
  }
}

/// Whether the frequencies of a pair have turns, on all axes that its angle is summed over.
inline bool has_turns(const Arguments& arguments, int64_t pair) {
  bool all = true;
  for (int64_t axis = 0; axis < mixed_axes(arguments); ++axis) {
    const int64_t index = axis * arguments.frequencies.axis_stride + pair;
    all = all && core::has_turn(read(arguments.frequencies, index));
  }
  return all;
}

/// Sets sine and cosine to NaN where a frequency is NaN.
template <typename T, bool interleaved>
void set_nan_angles(const Arguments& arguments, Angles<T>* angles) {
  for (int64_t slot = 0; slot < padded(arguments.pairs); ++slot) {
    const int64_t pair = pair_of_slot<T, interleaved>(slot);
    if (pair >= arguments.pairs || has_turns(arguments, pair)) continue;
    angles->sine[slot] = angles->cosine[slot] = std::numeric_limits<Compute<T>>::quiet_NaN();
  }
}

/// For Arguments::tangent: replaces sine and cosine by the factor that gives a rotated pair's
/// tangent.
template <typename T, bool interleaved>
void set_tangents(const Arguments& arguments, const Token& token, Angles<T>* angles) {
  for (int64_t slot = 0; slot < padded(arguments.pairs); ++slot) {
    const int64_t pair = pair_of_slot<T, interleaved>(slot);
    angles->cosine[slot] = angles->sine[slot] = 0;
    if (pair >= arguments.pairs) continue;
    double angle = 0;
    for (int64_t mixed = 0; mixed < mixed_axes(arguments); ++mixed) {
      const int64_t axis = arguments.axis_of_pair == nullptr ? mixed : arguments.axis_of_pair[pair];
      const double position = core::to_double(position_of(arguments, token.batch, token.seq, axis));
      angle +=
          position * read(arguments.frequencies, mixed * arguments.frequencies.axis_stride + pair);
    }
    angles->sine[slot] = static_cast<Compute<T>>(arguments.reverse ? -angle : angle);
  }
}

/// An element of a table. A NaN becomes the one that arithmetic would give: see
/// core::read_floating.
template <typename C, typename Stored>
C table_element(const Stored* table, int64_t index) {
  const auto value = static_cast<C>(core::load(table[index]));
  return value == value ? value : std::numeric_limits<C>::quiet_NaN();
}

template <typename T>
void read_table(const Arguments& arguments, const Turns<T>& turns, const Token& token,
                Angles<T>* angles) {
  using C = Compute<T>;
  const int64_t row =
      token.batch * arguments.table_stride[0] + token.seq * arguments.table_stride[1];
  const int64_t stride = arguments.table_stride[2];
  core::visit_scalar(arguments.table_scalar, [&](auto tag) {
    using Stored = typename decltype(tag)::type;
    const auto* const cosines = static_cast<const Stored*>(arguments.cosines) + row;
    const auto* const sines = static_cast<const Stored*>(arguments.sines) + row;
    for (int64_t slot = 0; slot < padded(arguments.pairs); ++slot) {
      const int64_t index = turns.pair_of_slot[slot] * stride;
      const C sine = table_element<C>(sines, index);
      angles->cosine[slot] = table_element<C>(cosines, index);
      angles->sine[slot] = arguments.reverse ? -sine : sine;
    }
  });
}

/// Cosines and sines of a token from tables, for each component of the pairs.
template <typename C>
struct ApartAngles {
  alignas(64) C cosine[2][max_padded_pairs];
  alignas(64) C sine[2][max_padded_pairs];

  /// Reads the angle of pair_of(i) into place i < `count`.
  template <typename PairOf>
  void read(const Arguments& arguments, const Token& token, int64_t head, int64_t count,
            const PairOf& pair_of) {
    const int64_t row = token.batch * arguments.table_stride[0] +
                        token.seq * arguments.table_stride[1] + head * arguments.table_head_stride;
    core::visit_scalar(arguments.table_scalar, [&](auto tag) {
      using Stored = typename decltype(tag)::type;
      for (int64_t k = 0; k < 2; ++k) {
        const int64_t first = row + k * arguments.table_second;
        const auto* const cosines = static_cast<const Stored*>(arguments.cosines) + first;
        const auto* const sines = static_cast<const Stored*>(arguments.sines) + first;
        for (int64_t i = 0; i < count; ++i) {
          const int64_t index = pair_of(i) * arguments.table_stride[2];
          cosine[k][i] = table_element<C>(cosines, index);
          const C value = table_element<C>(sines, index);
          sine[arguments.reverse ? 1 - k : k][i] = arguments.reverse ? -value : value;
        }
      }
    });
  }
};

/// Whether every element with an even index has the bits of the next one.
template <typename Stored>
bool neighbours_repeat(const Stored* row, int64_t pairs) {
  constexpr int64_t pairs_of_word = sizeof(Stored) == 2 ? 2 : 1;
  constexpr int bits = 8 * sizeof(Stored) % 64;  // unused for doubles, which are words themselves
  constexpr uint64_t firsts = sizeof(Stored) == 2 ? 0x0000ffff0000ffffu : 0xffffffffu;
  const auto word = [row](int64_t i) {
    uint64_t value;
    memcpy(&value, reinterpret_cast<const char*>(row) + i * int64_t{sizeof value}, sizeof value);
    return value;
  };
  uint64_t differ = 0;
  for (int64_t i = 0; i < pairs / pairs_of_word; ++i) {
    if constexpr (sizeof(Stored) == sizeof(uint64_t)) {
      differ |= word(2 * i) ^ word(2 * i + 1);
    } else {
      differ |= (word(i) ^ word(i) >> bits) & firsts;
    }
  }
  if (differ != 0 || pairs % pairs_of_word == 0) return differ == 0;
  const Stored* const last = row + 2 * (pairs - 1);
  return memcmp(last, last + 1, sizeof(Stored)) == 0;
}

/// Whether both components of each pair have the same bits in a table's row.
template <typename Stored>
bool repeats(const Stored* row, int64_t pairs, int64_t stride, int64_t second) {
  constexpr size_t size = sizeof(Stored);
  if (stride == 1) return memcmp(row, row + second, static_cast<size_t>(pairs) * size) == 0;
  if (stride == 2 && second == 1) return neighbours_repeat(row, pairs);
  for (int64_t i = 0; i < pairs; ++i, row += stride) {
    if (memcmp(row, row + second, size) != 0) return false;
  }
  return true;
}

/// Whether tables turn the components of a pair by different values in any head of a token.
inline bool turns_apart(const Arguments& arguments, const Token& token) {
  if (arguments.table_second == 0) return false;
  bool same = true;
  core::visit_scalar(arguments.table_scalar, [&](auto tag) {
    using Stored = typename decltype(tag)::type;
    const int64_t heads = arguments.table_head_stride == 0 ? 1 : arguments.views[0].heads;
    for (const void* table : {arguments.cosines, arguments.sines}) {
      const auto* row = static_cast<const Stored*>(table) +
                        token.batch * arguments.table_stride[0] +
                        token.seq * arguments.table_stride[1];
      for (int64_t head = 0; head < heads && same; ++head, row += arguments.table_head_stride) {
        same = repeats(row, arguments.pairs, arguments.table_stride[2], arguments.table_second);
      }
    }
  });
  return !same;
}

/// Computes the angles of a token in tensor `r` at the positions of its slots.
template <typename T, typename Position>
void begin_rotation(const Arguments& arguments, const Turns<T>& turns, const Token& token,
                    const Position& position, int64_t r, Angles<T>* angles) {
  if (arguments.cosines != nullptr) return read_table(arguments, turns, token, angles);
  const auto phase = [&](int64_t slot) { return phase_of<T>(position(slot), turns, slot); };
  fill_angles<T>(arguments, phase, angles);
  if (arguments.decay != nullptr) apply_decay<T>(arguments, turns, r, position, angles);
}

/// Computes the angles of a token in tensor `r` at floating positions; they are NaN where a
/// position is not finite.
template <typename T>
void begin_at_fractions(const Arguments& arguments, const Turns<T>& turns, const Token& token,
                        int64_t r, Angles<T>* angles) {
  core::Position of_axis[max_axes];
  for (int64_t axis = 0; axis < arguments.axes; ++axis) {
    of_axis[axis] = position_of(arguments, token.batch, token.seq, axis);
  }
  const auto position = [&](int64_t slot) {
    return of_axis[arguments.axes == 1 ? 0 : turns.axis_of_slot[slot]];
  };
  begin_rotation<T>(arguments, turns, token, position, r, angles);
  for (int64_t slot = 0; slot < padded(arguments.pairs); ++slot) {
    const auto scale = static_cast<Compute<T>>(position(slot).scale);
    angles->cosine[slot] *= scale;
    angles->sine[slot] *= scale;
  }
}

/// Computes the angles of a token as sums over axes, each with its turns; returns whether it is
/// rotated at all.
template <typename T>
bool begin_mixed(const Arguments& arguments, const Turns<T>* turns, const Token& token,
                 Angles<T>* angles) {
  const bool whole = !arguments.positions.floating;
  const int64_t slots = padded(arguments.pairs);
  TurnOf<T> total[max_padded_pairs];
  std::fill_n(total, slots, TurnOf<T>{});
  double scale = 1.0;
  for (int64_t axis = 0; axis < arguments.axes; ++axis) {
    const core::Position position = position_of(arguments, token.batch, token.seq, axis);
    if (leaves_token(arguments, position)) return false;
    scale *= position.scale;
    for (int64_t slot = 0; whole && slot < slots; ++slot) {
      total[slot] = sum(total[slot], phase_of<T>(position.whole, turns[axis], slot));
    }
    for (int64_t slot = 0; !whole && slot < slots; ++slot) {
      total[slot] = sum(total[slot], phase_of<T>(position, turns[axis], slot));
    }
  }
  const auto phase = [&](int64_t slot) { return total[slot]; };
  fill_angles<T>(arguments, phase, angles);
  for (int64_t slot = 0; !whole && slot < padded(arguments.pairs); ++slot) {
    angles->cosine[slot] *= static_cast<Compute<T>>(scale);
    angles->sine[slot] *= static_cast<Compute<T>>(scale);
  }
  return true;
}

/// Computes the angles of a token in tensor `r`; returns whether it is rotated at all.
template <typename T>
bool begin_token(const Arguments& arguments, const Turns<T>& turns, const Token& token,
                 Angles<T>* angles, int64_t r = 0) {
  if (arguments.positions.floating) {
    begin_at_fractions<T>(arguments, turns, token, r, angles);
    return true;
  }
  if (arguments.axes == 1) {
    const int64_t position = whole_position_of(arguments, token.batch, token.seq, 0);
    if (position == -1) return false;
    begin_rotation<T>(
        arguments, turns, token, [=](int64_t) { return position; }, r, angles);
    return true;
  }
  int64_t of_axis[max_axes];
  for (int64_t axis = 0; axis < arguments.axes; ++axis) {
    of_axis[axis] = whole_position_of(arguments, token.batch, token.seq, axis);
    if (of_axis[axis] == -1) return false;
  }
  const auto position = [&](int64_t slot) { return of_axis[turns.axis_of_slot[slot]]; };
  begin_rotation<T>(arguments, turns, token, position, r, angles);
  return true;
}

}  // namespace
}  // namespace posembed::rotary::POSEMBED_ISA
