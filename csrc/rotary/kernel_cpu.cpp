// Rotary embedding on the CPU, compiled once per instruction set.
// Tokens are walked in small tiles: sine and cosine of a tile are computed once, stay in the
// caches and serve all heads of query and key.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "rotary/angles_cpu.h"
#include "rotary/kernel.h"
#include "rotary/rotate_rows_cpu.h"
#include "rotary/streaming_cpu.h"

namespace posembed::rotary::POSEMBED_ISA {
namespace {

/// Where the tokens of a head are neighbours in memory, `tile_tokens` of `tile_heads` heads are
/// rotated before those of the next heads: few enough runs of memory for the hardware's prefetcher,
/// and long ones. Measured, bfloat16 to new memory: 2 heads or 16 tokens take a seventh longer,
/// more of either gains little.
template <typename T>
constexpr int64_t tile_tokens = 128 / static_cast<int64_t>(sizeof(Compute<T>));
constexpr int64_t tile_heads = 4;

/// How one tensor is walked.
template <typename T>
struct Walk {
  const Rows* rows;
  RotateGroup<T> rotation;
  bool streaming;  // past the caches
};

template <typename T, bool interleaved>
Walk<T> plan_walk(const Arguments& arguments, const Rows& rows) {
  if (arguments.decay != nullptr) return {&rows, rotate_decaying_group<interleaved, T>, false};
  if (arguments.cosines != nullptr) {
    return {&rows,
            arguments.products == Products::rounded
                ? rotate_group_in_steps<interleaved, Products::rounded, T>
                : rotate_group_in_steps<interleaved, Products::kept, T>,
            false};
  }
  const bool streaming = can_stream<T>(arguments, rows);
  return {&rows,
          streaming ? choose_rotation<T, interleaved, true>(arguments.pairs)
                    : choose_rotation<T, interleaved, false>(arguments.pairs),
          streaming};
}

int64_t place_of(const Token& token, int64_t head, const int64_t* stride) {
  return token.batch * stride[0] + token.seq * stride[1] + head * stride[2];
}

/// The hardware's prefetcher does not follow from one tensor to the next. Measured: prefetching the
/// first lines of a token before its angles are computed gains 2.5 % for streamed float32;
/// prefetching more, or for other data, loses.
template <typename T>
void prefetch_token(const Arguments& arguments, const Token& token) {
  constexpr uintptr_t bytes = 256, line = 64;
  for (int64_t r = 0; r < arguments.count; ++r) {
    const Rows& rows = arguments.rows[r];
    const T* first = static_cast<const T*>(rows.in) + place_of(token, 0, rows.in_stride);
    const auto begin = reinterpret_cast<uintptr_t>(first);
    for (uintptr_t at = begin; at < begin + bytes; at += line) {
      __builtin_prefetch(reinterpret_cast<const void*>(at));
    }
  }
}

/// `count` heads of a token, from `head` on.
template <typename T>
POSEMBED_INLINE RowGroup<T> heads_of_token(const Rows& rows, const Token& token, int64_t head,
                                           int64_t count) {
  return {static_cast<const T*>(rows.in) + place_of(token, head, rows.in_stride),
          static_cast<T*>(rows.out) + place_of(token, head, rows.out_stride), count,
          rows.in_stride[2], rows.out_stride[2]};
}

/// Whether the tokens of a head are nearer to each other than the heads of a token.
bool tokens_are_neighbours(const Arguments& arguments) {
  const Rows& rows = arguments.rows[0];
  return rows.heads > 1 && rows.in_stride[1] < rows.in_stride[2];
}

/// Fills `tokens`, and `angles` for tensor `r`, of `count` tokens from `next` on; returns the next
/// token.
template <typename T, bool interleaved>
Token begin_tile(const Arguments& arguments, const Turns<T>& turns, int64_t r, int64_t count,
                 Token next, Token* tokens, Angles<T>* angles) {
  for (int64_t t = 0; t < count; ++t) {
    tokens[t] = next;
    tokens[t].rotated = begin_token<T>(arguments, turns, next, angles + t, r);
    if (turns.has_nan) spoil_angles<T, interleaved>(arguments, angles + t);
    if (arguments.tangent) set_tangents<T, interleaved>(arguments, next, angles + t);
    if (++next.seq == arguments.seq) next = {next.batch + 1, 0, false};
  }
  return next;
}

/// Rotates, or leaves, the rows of a tile: of `heads` heads, then of the next.
template <typename T>
void rotate_tile(const Arguments& arguments, const Walk<T>& walk, const Token* tokens,
                 const Angles<T>* angles, int64_t count, int64_t heads) {
  const Rows& rows = *walk.rows;
  for (int64_t head = 0; head < rows.heads; head += heads) {
    const int64_t group = std::min(heads, rows.heads - head);
    for (int64_t t = 0; t < count; ++t) {
      rotate_rows(arguments, rows, tokens[t], walk.rotation, angles[t],
                  heads_of_token<T>(rows, tokens[t], head, group));
    }
  }
}

template <typename T, bool interleaved>
void rotate_tokens(const Arguments& arguments, int64_t begin, int64_t end) {
  Turns<T> turns;
  Angles<T> angles[tile_tokens<T>];
  Token tokens[tile_tokens<T>];
  order_turns<T, interleaved>(arguments, &turns);
  order_axes<T, interleaved>(arguments, &turns);
  order_decay<T, interleaved>(arguments, &turns);
  Walk<T> walks[2] = {};
  for (int64_t r = 0; r < arguments.count; ++r) {
    walks[r] = plan_walk<T, interleaved>(arguments, arguments.rows[r]);
  }
  const bool neighbours = tokens_are_neighbours(arguments);
  const int64_t tile = neighbours ? tile_tokens<T> : 1;
  const int64_t heads = neighbours ? tile_heads : std::numeric_limits<int64_t>::max();
  Token next{begin / arguments.seq, begin % arguments.seq, false};
  for (int64_t first = begin; first < end; first += tile) {
    const int64_t count = end - first < tile ? end - first : tile;
    const Token begin_of_tile = next;
    if (std::is_same_v<T, float> && walks[0].streaming) prefetch_token<T>(arguments, next);
    for (int64_t r = 0; r < arguments.count; ++r) {
      if (r == 0 || arguments.decay != nullptr) {  // query and key share their angles, but for xPos
        next =
            begin_tile<T, interleaved>(arguments, turns, r, count, begin_of_tile, tokens, angles);
      }
      rotate_tile(arguments, walks[r], tokens, angles, count, heads);
    }
  }
  if (walks[0].streaming || walks[1].streaming) core::stream_fence();
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
