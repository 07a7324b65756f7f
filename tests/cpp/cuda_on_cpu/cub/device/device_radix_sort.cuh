// Replaces CUB when kernels' sources run on the CPU.
#pragma once

#include <cuda_runtime.h>

#include <numeric>

namespace cub {

struct DeviceRadixSort {
  template <typename Key, typename Value>
  static cudaError_t SortPairs(void* temporary, size_t& bytes, const Key* keys_in, Key* keys_out,
                               const Value* values_in, Value* values_out, int64_t count, int low,
                               int high, cudaStream_t = nullptr) {
    if (temporary == nullptr) return bytes = 1, cudaSuccess;
    std::vector<int64_t> order(static_cast<size_t>(count));
    std::iota(order.begin(), order.end(), 0);
    const auto digits = [&](int64_t i) {
      return (uint64_t{keys_in[i]} & ((uint64_t{1} << high) - 1)) >> low;
    };
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return digits(a) < digits(b); });
    for (const int64_t from : order) {
      *keys_out++ = keys_in[from];
      *values_out++ = values_in[from];
    }
    return cudaSuccess;
  }
};

}  // namespace cub
