// Tiles: some heads of some tokens. If the tokens of a head are neighbours in memory, each head is
// a separate run; with tiles a kernel follows few runs at a time and fetches ahead in them.
// Included only by kernel_cpu.cpp files.
#pragma once

#include <algorithm>
#include <cstdint>

#include "rotary/gaps_cpu.h"

namespace posembed::rotary::POSEMBED_ISA {
namespace {

/// The order of tokens and heads: `heads` of each token of a tile, then their next heads.
struct Tile {
  int64_t tokens;
  int64_t heads;
};

/// `for_runs` if heads are runs in a tensor that leaves the caches, otherwise one token at a time.
/// Tiles of several tokens fetch the rows of the next tile.
template <typename T>
Tile choose_tile(const Arguments& arguments, Tile for_runs) {
  bool runs = false;
  int64_t heads = 0;
  for (int64_t r = 0; r < arguments.count; ++r) {
    runs = runs || heads_are_runs(arguments.rows[r]);
    heads = std::max(heads, arguments.rows[r].heads);
  }
  return runs && fetches_gaps<T>(arguments) ? for_runs : Tile{1, heads};
}

/// Fetches `count` rows of `dim`, each in a separate run, into the second-level cache: the first
/// could not keep them while other rows are read.
template <typename T>
POSEMBED_INLINE void fetch_rows(const T* in, int64_t step, int64_t count, int64_t dim) {
  constexpr uintptr_t line = 64;
  for (int64_t row = 0; row < count; ++row) {
    const auto begin = reinterpret_cast<uintptr_t>(in + row * step);
    const auto end = begin + static_cast<uintptr_t>(dim) * sizeof(T);
    for (uintptr_t at = begin; at < end; at += line) {
      __builtin_prefetch(reinterpret_cast<const void*>(at), 0, 2);
    }
  }
}

/// Fetches heads [begin, end) of the token `tile.tokens` after `token`.
template <typename T>
POSEMBED_INLINE void fetch_next_tile(const Arguments& arguments, int64_t r, const Tile& tile,
                                     const Token& token, int64_t begin, int64_t end) {
  if (tile.tokens == 1) return;
  const Rows& rows = arguments.rows[r];
  const Token next{token.batch, token.seq + tile.tokens, false};
  fetch_rows(row_of<T>(rows, next, begin), rows.in_stride[2], end - begin,
             row_dim(arguments, rows));
}

}  // namespace
}  // namespace posembed::rotary::POSEMBED_ISA
