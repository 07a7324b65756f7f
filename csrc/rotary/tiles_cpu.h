// Tiles: some heads of some tokens. In a head-major tensor each head is a separate memory stream;
// with tiles a kernel reads few streams at a time and prefetches them.
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

/// `head_major` if a tensor is head-major and exceeds the caches; otherwise one token at a time.
/// Tiles of several tokens fetch the rows of the next tile.
template <typename T>
Tile choose_tile(const Arguments& arguments, Tile head_major) {
  bool any_head_major = false;
  int64_t heads = 0;
  for (int64_t r = 0; r < arguments.count; ++r) {
    any_head_major = any_head_major || is_head_major(arguments.views[r]);
    heads = std::max(heads, arguments.views[r].heads);
  }
  return any_head_major && fetches_gaps<T>(arguments) ? head_major : Tile{1, heads};
}

/// Fetches `count` rows of `dim`, each in a separate stream, into the L2 cache: L1 could not keep
/// them while other rows are read.
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
  const HeadView& view = arguments.views[r];
  const Token next{token.batch, token.seq + tile.tokens, false};
  fetch_rows(row_of<T>(view, next, begin), view.in_stride[2], end - begin,
             row_dim(arguments, view));
}

}  // namespace
}  // namespace posembed::rotary::POSEMBED_ISA
