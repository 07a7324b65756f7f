// Replaces CUB when kernels' sources run on the CPU.
#pragma once

#include <cuda_runtime.h>

#include <numeric>

namespace cub {

struct DeviceScan {
  template <typename T>
  static cudaError_t InclusiveSum(void* temporary, size_t& bytes, const T* in, T* out,
                                  int64_t count, cudaStream_t = nullptr) {
    if (temporary == nullptr) return bytes = 1, cudaSuccess;
    std::partial_sum(in, in + count, out);
    return cudaSuccess;
  }
};

}  // namespace cub
