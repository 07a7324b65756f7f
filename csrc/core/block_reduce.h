// Block-wide reductions in a fixed order: shuffles within each warp, then shared memory across
// warps.
#pragma once

#include "core/device_vector.h"

namespace posembed::core {

struct Add {
  template <typename V>
  __device__ V operator()(V a, V b) const {
    return a + b;
  }
};

struct Larger {
  template <typename V>
  __device__ V operator()(V a, V b) const {
    return a > b ? a : b;
  }
};

/// Reduces a value over a warp; every lane gets the result.
template <typename V, typename Join>
__device__ V over_warp(V value, Join join) {
#pragma unroll
  for (int offset = warp_size / 2; offset > 0; offset /= 2) {
    value = join(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

/// Reduces a value over a block of whole warps; every thread gets the result. Every thread must
/// call it. Another barrier must come before the next call of the same instantiation.
template <typename V, typename Join>
__device__ V over_block_once(V value, Join join) {
  __shared__ V values[1024 / warp_size];
  value = over_warp(value, join);
  if (threadIdx.x % warp_size == 0) values[threadIdx.x / warp_size] = value;
  __syncthreads();
  V result = values[0];
#pragma unroll 4
  for (unsigned warp = 1; warp < blockDim.x / warp_size; ++warp) {
    result = join(result, values[warp]);
  }
  return result;
}

/// The same with that barrier.
template <typename V, typename Join>
__device__ V over_block(V value, Join join) {
  const V result = over_block_once(value, join);
  __syncthreads();
  return result;
}

// ------------------------------------------------------------------------------------------- parts
// Adds the partial sums that blocks have written to memory, in a fixed order and without atomics. A
// block's lanes process neighbouring columns; its warps divide the parts.

inline constexpr int part_warps = 32;
inline constexpr int part_threads = part_warps * warp_size;

/// The calling thread's column.
__device__ inline int64_t part_column() {
  return int64_t{blockIdx.x} * warp_size + threadIdx.x % warp_size;
}

/// Whether the calling thread writes its column's sum.
__device__ inline bool writes_parts() { return threadIdx.x < warp_size; }

/// The sum over `parts` rows, `stride` elements apart, in the threads that write. All threads of
/// the block must call it, once.
template <typename C>
__device__ C sum_of_parts(const C* sums, int64_t parts, int64_t stride, int64_t columns) {
  __shared__ C totals[part_warps][warp_size];
  const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
  const int64_t column = part_column();
  C total = 0;
  if (column < columns) {
    const int64_t end = (warp + 1) * parts / part_warps;
#pragma unroll 8
    for (int64_t part = warp * parts / part_warps; part < end; ++part) {
      total += sums[part * stride + column];
    }
  }
  totals[warp][lane] = total;
  __syncthreads();
  if (warp > 0) return total;
  for (int other = 1; other < part_warps; ++other) total += totals[other][lane];
  return total;
}

}  // namespace posembed::core
