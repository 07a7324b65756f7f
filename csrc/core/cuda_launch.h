// CUDA launches: types shared by CUDA kernels and operators, which include no CUDA header.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace posembed::core {

/// The type behind cudaStream_t.
using CudaStream = CUstream_st*;

#if defined(POSEMBED_WITH_CUDA)
inline constexpr bool built_with_cuda = true;
#else
inline constexpr bool built_with_cuda = false;
#endif

// ------------------------------------------------------------------------------------------ errors
// CUDA kernels report a bad id or position without killing the context: the first error is written
// to a record in pinned host memory that the device maps, and the host reads it at the next call.

/// The kind of value that was out of range. The host turns it into a message.
enum class ErrorKind : int32_t {
  none = 0,
  token_id,
  position,
  token_type,
  distance,
  slot,
  bag_offset
};

struct DeviceError {
  /// 0: free. 1: being written. 2: complete. 3: being read.
  uint32_t state;
  ErrorKind kind;
  int64_t value;  // the id or position that was given
  int64_t index;  // its index in the flattened tensor
  int64_t limit;  // valid values are 0 … limit - 1; negative: -1 and more
};

#if defined(__CUDACC__)
/// Keeps the first error of all kernels; later ones are dropped until the host has read it.
__device__ inline void record_error(DeviceError* error, ErrorKind kind, int64_t value,
                                    int64_t index, int64_t limit) {
  // Read first: if many threads have an error, an atomic by each would saturate the bus.
  if (error == nullptr || *static_cast<const volatile uint32_t*>(&error->state) != 0u) return;
  if (atomicCAS_system(&error->state, 0u, 1u) != 0u) return;
  error->kind = kind;
  error->value = value;
  error->index = index;
  error->limit = limit;
  __threadfence_system();
  atomicExch_system(&error->state, 2u);
}
#endif

// ----------------------------------------------------------------------------------------- numbers
// Numbers go from the host to a device as kernel arguments, because a CUDA graph can capture those
// but not a copy from pageable memory.

/// Writes `count` numbers to device memory. Returns nullptr, or the text of a CUDA error. Exists in
/// CUDA builds only.
const char* write_floats_cuda(const float* values, int64_t count, float* out, CudaStream stream);

}  // namespace posembed::core
