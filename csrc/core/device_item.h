// How rows are divided among warps: as items, each a row or a piece of a long row.
#pragma once

#include "core/device_vector.h"

namespace posembed::core {

inline constexpr int threads = 256;
inline constexpr int warps = threads / warp_size;

struct Item {
  int64_t row;
  int64_t column;  // first column of this lane
};

/// The item of the calling lane, where rows have `pieces` pieces of `vectors` vectors a lane.
template <int width>
__device__ Item item_of_lane(int64_t pieces, int vectors) {
  const int64_t item = int64_t{blockIdx.x} * warps + threadIdx.x / warp_size;
  const int64_t row = pieces == 1 ? item : item / pieces;  // a 64-bit division costs a short row
  const int64_t piece = item - row * pieces;
  return {row, (piece * vectors * warp_size + threadIdx.x % warp_size) * width};
}

/// Blocks of `threads` threads that take `items` items.
inline int64_t blocks_for(int64_t items) { return divide_up(items, warps); }

}  // namespace posembed::core
