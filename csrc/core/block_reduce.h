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

}  // namespace posembed::core
