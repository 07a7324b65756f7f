// Divides rows into items for warps: an item is a row or a piece of a long row.
#pragma once

#include "core/device_vector.h"

namespace posembed::core {

inline constexpr int threads = 256;
inline constexpr int warps = threads / warp_size;

struct Item {
  int64_t row;
  int64_t column;  // first column of this lane
};

/// The calling lane's item. Rows have `pieces` pieces of `vectors` vectors per lane.
template <int width>
__device__ Item item_of_lane(int64_t pieces, int vectors) {
  const int64_t item = int64_t{blockIdx.x} * (blockDim.x / warp_size) + threadIdx.x / warp_size;
  const int64_t row = pieces == 1 ? item : item / pieces;  // short rows avoid a 64-bit division
  const int64_t piece = item - row * pieces;
  return {row, (piece * vectors * warp_size + threadIdx.x % warp_size) * width};
}

/// The number of blocks of `threads` threads for `items` items.
inline int64_t blocks_for(int64_t items) { return divide_up(items, warps); }

}  // namespace posembed::core
