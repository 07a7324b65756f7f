// Rotary embedding on the CPU, compiled once per instruction set.
// Tokens are walked in small tiles: sine and cosine of a tile are computed once, stay in the
// first-level cache and serve all heads of query and key.
#include <cstdint>

#include "rotary/angles_cpu.h"
#include "rotary/kernel.h"
#include "rotary/rotate_rows_cpu.h"
#include "rotary/streaming_cpu.h"

namespace posembed::rotary::POSEMBED_ISA {
namespace {

/// Tokens of a tile if the tokens of a head are neighbours in memory, and are rotated head by head.
constexpr int64_t tile_tokens = 16;

/// How one tensor is walked.
template <typename T>
struct Walk {
  const Rows* rows;
  RotateGroup<T> rotation;
  RotateGroup<T> succession;  // of one head's rows of a tile; nullptr: one by one
  bool far;                   // rows come from memory, not from a cache
  bool streaming;             // and go past the caches
};

template <typename T, bool interleaved>
Walk<T> plan_walk(const Arguments& arguments, const Rows& rows) {
  const bool far = is_far<T>(arguments, rows);
  if (arguments.decay != nullptr) {
    return {&rows, rotate_decaying_group<interleaved, T>, nullptr, far, false};
  }
  if (arguments.cosines != nullptr) {
    return {&rows,
            arguments.products == Products::rounded
                ? rotate_group_in_steps<interleaved, Products::rounded, T>
                : rotate_group_in_steps<interleaved, Products::kept, T>,
            nullptr, far, false};
  }
  const bool streaming = can_stream<T>(arguments, rows);
  return {&rows,
          streaming ? choose_rotation<T, interleaved, true>(arguments.pairs)
                    : choose_rotation<T, interleaved, false>(arguments.pairs),
          streaming ? rotate_succession<interleaved, true, T>
                    : rotate_succession<interleaved, false, T>,
          far, streaming};
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

/// Dimensions whose neighbours follow each other in a group of rows.
constexpr int64_t along_seq = 1, along_heads = 2;

/// The row of a token's head, and `count` - 1 behind it, steps of dimension `along` apart.
template <typename T>
RowGroup<T> row_group(const Rows& rows, const Token& token, int64_t head, int64_t count,
                      int64_t along) {
  return {static_cast<const T*>(rows.in) + place_of(token, head, rows.in_stride),
          static_cast<T*>(rows.out) + place_of(token, head, rows.out_stride), count,
          rows.in_stride[along], rows.out_stride[along]};
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

/// The rows that follow `count` rows of a head: those of the next head, or of the next tile.
template <typename T>
RowGroup<T> next_rows(const Rows& rows, Token token, int64_t head, int64_t count) {
  if (head + 1 == rows.heads) token.seq += count;
  return row_group<T>(rows, token, (head + 1) % rows.heads, count, along_seq);
}

/// Prefetches rows and the pages that their results go to. The hardware's prefetcher does not
/// foresee the jump from head to head; without this a rotation takes a third more time.
template <typename T>
void prefetch_rows(const RowGroup<T>& rows, int64_t dim) {
  constexpr int64_t line = 64 / sizeof(T);
  __builtin_prefetch(rows.out, /*write=*/0, /*locality=*/0);
  for (int64_t row = 0; row < rows.count; ++row) {
    const T* in = rows.in + row * rows.in_step;
    for (int64_t i = 0; i < dim; i += line) __builtin_prefetch(in + i, 0, /*locality=*/2);
  }
}

/// Whether a head's rows of these tokens can be rotated together.
template <typename T>
bool is_succession(const Walk<T>& walk, const Token* tokens, int64_t count) {
  bool rotated = walk.succession != nullptr;
  for (int64_t t = 0; t < count; ++t) rotated &= tokens[t].rotated;
  return rotated && tokens[count - 1].batch == tokens[0].batch;
}

/// Rotates, or leaves, the rows of a tile in the order in which they lie in memory.
template <typename T>
void rotate_tile(const Arguments& arguments, const Walk<T>& walk, const Token* tokens,
                 const Angles<T>* angles, int64_t count) {
  const Rows& rows = *walk.rows;
  if (count == 1) {
    rotate_rows(arguments, rows, tokens[0], walk.rotation, angles[0],
                row_group<T>(rows, tokens[0], 0, rows.heads, along_heads));
    return;
  }
  const bool together = is_succession(walk, tokens, count);
  for (int64_t head = 0; head < rows.heads; ++head) {
    if (walk.far)
      prefetch_rows(next_rows<T>(rows, tokens[0], head, count), row_dim(arguments, rows));
    if (together) {
      rotate_rows(arguments, rows, tokens[0], walk.succession, angles[0],
                  row_group<T>(rows, tokens[0], head, count, along_seq));
      continue;
    }
    for (int64_t t = 0; t < count; ++t) {
      rotate_rows(arguments, rows, tokens[t], walk.rotation, angles[t],
                  row_group<T>(rows, tokens[t], head, 1, along_heads));
    }
  }
}

template <typename T, bool interleaved>
void rotate_tokens(const Arguments& arguments, int64_t begin, int64_t end) {
  Turns<T> turns;
  Angles<T> angles[tile_tokens];
  Token tokens[tile_tokens];
  order_turns<T, interleaved>(arguments, &turns);
  order_axes<T, interleaved>(arguments, &turns);
  order_decay<T, interleaved>(arguments, &turns);
  Walk<T> walks[2] = {};
  for (int64_t r = 0; r < arguments.count; ++r) {
    walks[r] = plan_walk<T, interleaved>(arguments, arguments.rows[r]);
  }
  const int64_t tile = tokens_are_neighbours(arguments) ? tile_tokens : 1;
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
      rotate_tile(arguments, walks[r], tokens, angles, count);
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
