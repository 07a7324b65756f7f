// Device code's vectors of 16 bytes, and what every launcher needs.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/scalar.h"

namespace posembed::core {

inline constexpr int warp_size = 32;

/// `width` neighbouring elements, loaded and stored in one instruction.
template <typename T, int width>
struct alignas(sizeof(T) * width) Vector {
  T values[width];
};

/// Elements of 16 bytes.
template <typename T>
inline constexpr int vector_width = 16 / static_cast<int>(sizeof(T));

/// True when rows of `dim` elements that begin `stride` elements apart can be read in 16-byte
/// vectors.
template <typename T>
inline bool vectorizable(const void* data, int64_t dim, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && dim % vector_width<T> == 0 &&
         stride % vector_width<T> == 0;
}

inline int64_t divide_up(int64_t count, int64_t by) { return (count + by - 1) / by; }

/// Runs `kernel` in `blocks` blocks of `threads` threads.
template <typename... Parameters, typename... Arguments>
inline void launch(void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream,
                   const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  cudaLaunchKernelEx(&config, kernel, arguments...);
}

/// nullptr, or the text of the error of the launch before.
inline const char* launch_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace posembed::core
