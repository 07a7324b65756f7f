// Rotary embedding on the CPU, compiled once per instruction set.
// Tokens are walked in small tiles: sine and cosine of a tile are computed once, stay in the
// first-level cache and serve all heads of query and key.
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/vector.h"
#include "rotary/kernel.h"

namespace posembed::rotary::POSEMBED_ISA {
namespace {

using core::Compute;
using core::FloatPair;
using core::Floats;
using core::lanes;

/// Tokens of a tile. Walking four side by side gives the memory system four pages to stream from.
constexpr int64_t tile_tokens = 4;

/// Tables are padded so that vectors never need a tail.
constexpr int64_t padded(int64_t pairs) {
  return (pairs + 2 * lanes - 1) / (2 * lanes) * (2 * lanes);
}
constexpr int64_t max_padded_pairs = padded(max_pairs);

/// Outputs from this size on are written past the caches: they would not stay in them.
constexpr int64_t streaming_bytes = int64_t{8} << 20;

template <typename T>
using TurnOf = std::conditional_t<std::is_same_v<T, double>, core::Turn128, core::Turn64>;

/// Turns per position, in the order in which vectors hold the pairs.
template <typename T>
struct Turns {
  alignas(64) TurnOf<T> of_slot[max_padded_pairs];
};

/// Sine and cosine of a token, in the same order.
template <typename T>
struct Angles {
  alignas(64) Compute<T> cosine[max_padded_pairs];
  alignas(64) Compute<T> sine[max_padded_pairs];
};

/// A token of a tile: where its rows begin and whether it is rotated at all.
struct Token {
  int64_t batch = 0;
  int64_t seq = 0;
  bool rotated = false;
};

template <typename T, bool interleaved>
constexpr int64_t pair_of_slot(int64_t slot) {
  if constexpr (std::is_same_v<T, double>) return slot;
  constexpr int64_t block = interleaved ? lanes : 2 * lanes;
  const int64_t place = slot % block;
  return slot - place +
         (interleaved ? core::pair_of_lane<T>(place) : core::element_of_slot<T>(place));
}

template <typename T, bool interleaved>
void order_turns(const Arguments& arguments, Turns<T>* turns) {
  for (int64_t slot = 0; slot < padded(arguments.pairs); ++slot) {
    const int64_t pair = pair_of_slot<T, interleaved>(slot);
    const core::Turn128 turn = pair < arguments.pairs ? arguments.turns[pair] : core::Turn128{};
    if constexpr (std::is_same_v<T, double>) {
      turns->of_slot[slot] = turn;
    } else {
      turns->of_slot[slot] = core::round_to_turn64(turn);
    }
  }
}

template <typename T>
void fill_angles(const Arguments& arguments, const Turns<T>& turns, int64_t position,
                 Angles<T>* angles) {
  const Compute<T> amplitude = static_cast<Compute<T>>(arguments.amplitude);
  const Compute<T> sine_amplitude = arguments.reverse ? -amplitude : amplitude;
  const int64_t slots = padded(arguments.pairs);
  for (int64_t begin = 0; begin < slots; begin += lanes) {
    for (int64_t slot = begin; slot < begin + lanes; ++slot) {
      Compute<T> sine, cosine;
      core::sincos_turn(core::phase(position, turns.of_slot[slot]), &sine, &cosine);
      angles->cosine[slot] = cosine * amplitude;
      angles->sine[slot] = sine * sine_amplitude;
    }
  }
}

POSEMBED_INLINE void rotate(Floats* first, Floats* second, const float* cosine, const float* sine) {
  const Floats c = core::load_vector<Floats>(cosine);
  const Floats s = core::load_vector<Floats>(sine);
  const Floats x = *first, y = *second;
  *first = core::fma(x, c, -(y * s));
  *second = core::fma(y, c, x * s);
}

/// One row, pairs (i, i + pairs).
template <bool streaming, typename T>
void rotate_halves(const T* in, T* out, const Angles<T>& angles, int64_t pairs) {
  int64_t i = 0;
  for (; i + 2 * lanes <= pairs; i += 2 * lanes) {
    FloatPair x = core::load_pair(in + i), y = core::load_pair(in + pairs + i);
    rotate(&x.first, &y.first, angles.cosine + i, angles.sine + i);
    rotate(&x.second, &y.second, angles.cosine + i + lanes, angles.sine + i + lanes);
    core::store_pair<streaming>(x, out + i);
    core::store_pair<streaming>(y, out + pairs + i);
  }
  if (const int64_t rest = pairs - i; rest > 0) {
    FloatPair x = core::load_pair(in + i, rest), y = core::load_pair(in + pairs + i, rest);
    rotate(&x.first, &y.first, angles.cosine + i, angles.sine + i);
    rotate(&x.second, &y.second, angles.cosine + i + lanes, angles.sine + i + lanes);
    core::store_pair(x, out + i, rest);
    core::store_pair(y, out + pairs + i, rest);
  }
}

/// One row, pairs (2i, 2i + 1).
template <bool streaming, typename T>
void rotate_neighbours(const T* in, T* out, const Angles<T>& angles, int64_t pairs) {
  int64_t i = 0;
  for (; i + lanes <= pairs; i += lanes) {
    FloatPair x = core::split_neighbours<T>(core::load_pair(in + 2 * i));
    rotate(&x.first, &x.second, angles.cosine + i, angles.sine + i);
    core::store_pair<streaming>(core::join_neighbours<T>(x), out + 2 * i);
  }
  if (const int64_t rest = pairs - i; rest > 0) {
    FloatPair x = core::split_neighbours<T>(core::load_pair(in + 2 * i, 2 * rest));
    rotate(&x.first, &x.second, angles.cosine + i, angles.sine + i);
    core::store_pair(core::join_neighbours<T>(x), out + 2 * i, 2 * rest);
  }
}

template <bool streaming>
void rotate_halves(const double* in, double* out, const Angles<double>& angles, int64_t pairs) {
  for (int64_t i = 0; i < pairs; ++i) {
    const double x = in[i], y = in[pairs + i], c = angles.cosine[i], s = angles.sine[i];
    out[i] = core::fma(x, c, -(y * s));
    out[pairs + i] = core::fma(y, c, x * s);
  }
}

template <bool streaming>
void rotate_neighbours(const double* in, double* out, const Angles<double>& angles, int64_t pairs) {
  for (int64_t i = 0; i < pairs; ++i) {
    const double x = in[2 * i], y = in[2 * i + 1], c = angles.cosine[i], s = angles.sine[i];
    out[2 * i] = core::fma(x, c, -(y * s));
    out[2 * i + 1] = core::fma(y, c, x * s);
  }
}

template <typename T>
void copy(const T* in, T* out, int64_t count) {
  memcpy(out, in, static_cast<size_t>(count) * sizeof(T));
}

template <typename T, bool interleaved, bool streaming>
void rotate_row(const Arguments& arguments, const T* in, T* out, const Angles<T>& angles) {
  const int64_t begin = arguments.start, end = begin + 2 * arguments.pairs;
  if (in != out) {
    copy(in, out, begin);
    copy(in + end, out + end, arguments.head_dim - end);
  }
  if constexpr (interleaved) {
    rotate_neighbours<streaming>(in + begin, out + begin, angles, arguments.pairs);
  } else {
    rotate_halves<streaming>(in + begin, out + begin, angles, arguments.pairs);
  }
}

/// All rows of a tile, the tokens of a head side by side.
template <typename T, bool interleaved, bool streaming>
void rotate_rows(const Arguments& arguments, const Rows& rows, const Token* tokens, int64_t count,
                 const Angles<T>* angles) {
  const T* in[tile_tokens];
  T* out[tile_tokens];
  for (int64_t t = 0; t < count; ++t) {
    const Token& token = tokens[t];
    in[t] = static_cast<const T*>(rows.in) + token.batch * rows.in_stride[0] +
            token.seq * rows.in_stride[1];
    out[t] = static_cast<T*>(rows.out) + token.batch * rows.out_stride[0] +
             token.seq * rows.out_stride[1];
  }
  for (int64_t head = 0; head < rows.heads; ++head) {
    for (int64_t t = 0; t < count; ++t) {
      const T* source = in[t] + head * rows.in_stride[2];
      T* target = out[t] + head * rows.out_stride[2];
      if (tokens[t].rotated) {
        rotate_row<T, interleaved, streaming>(arguments, source, target, angles[t]);
      } else if (source != target) {
        copy(source, target, arguments.head_dim);
      }
    }
  }
}

/// Whether `rows` are worth writing past the caches, and every vector of their window is aligned
/// for it.
template <typename T>
bool can_stream(const Arguments& arguments, const Rows& rows) {
  constexpr int64_t line = 64;
  const auto aligned = [](int64_t elements) {
    return elements * static_cast<int64_t>(sizeof(T)) % line == 0;
  };
  const int64_t elements = arguments.batch * arguments.seq * rows.heads * arguments.head_dim;
  return rows.in != rows.out && elements * static_cast<int64_t>(sizeof(T)) >= streaming_bytes &&
         reinterpret_cast<uintptr_t>(rows.out) % line == 0 && aligned(arguments.start) &&
         aligned(arguments.pairs) && aligned(rows.out_stride[0]) && aligned(rows.out_stride[1]) &&
         aligned(rows.out_stride[2]);
}

int64_t position_of(const Arguments& arguments, const Token& token) {
  if (arguments.positions.data == nullptr) return arguments.offset + token.seq;
  return core::read(arguments.positions, token.batch * arguments.position_stride[0] +
                                             token.seq * arguments.position_stride[1]);
}

template <typename T, bool interleaved>
void rotate_tokens(const Arguments& arguments, int64_t begin, int64_t end) {
  Turns<T> turns;
  Angles<T> angles[tile_tokens];
  Token tokens[tile_tokens];
  order_turns<T, interleaved>(arguments, &turns);
  bool streaming[2] = {};
  for (int64_t r = 0; r < arguments.count; ++r)
    streaming[r] = can_stream<T>(arguments, arguments.rows[r]);

  Token next{begin / arguments.seq, begin % arguments.seq};
  for (int64_t first = begin; first < end; first += tile_tokens) {
    const int64_t count = end - first < tile_tokens ? end - first : tile_tokens;
    for (int64_t t = 0; t < count; ++t) {
      const int64_t position = position_of(arguments, next);
      next.rotated = position != -1;
      if (next.rotated) fill_angles<T>(arguments, turns, position, angles + t);
      tokens[t] = next;
      if (++next.seq == arguments.seq) next = {next.batch + 1, 0};
    }
    for (int64_t r = 0; r < arguments.count; ++r) {
      const auto rows =
          streaming[r] ? rotate_rows<T, interleaved, true> : rotate_rows<T, interleaved, false>;
      rows(arguments, arguments.rows[r], tokens, count, angles);
    }
  }
  if (streaming[0] || streaming[1]) core::stream_fence();
}

}  // namespace

void rotate(const Arguments& arguments, int64_t begin, int64_t end) {
  if (begin >= end) return;
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto tokens = arguments.interleaved ? rotate_tokens<T, true> : rotate_tokens<T, false>;
    tokens(arguments, begin, end);
  });
}

}  // namespace posembed::rotary::POSEMBED_ISA
