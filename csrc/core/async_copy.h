// Asynchronous copies from global to shared memory (cp.async). Data in flight takes no registers.
// GPUs before compute capability 8.0 copy synchronously.
#pragma once

#include "core/device_vector.h"

namespace posembed::core {

/// Starts to copy an element or a vector. The thread must call wait_for_copies() before it reads
/// the copy.
template <typename V>
__device__ void copy_async(const V* from, V* to) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  constexpr int size = sizeof(V);
  if constexpr (size == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                     static_cast<unsigned>(__cvta_generic_to_shared(to))),
                 "l"(__cvta_generic_to_global(from))
                 : "memory");
  } else if constexpr (size == 8 || size == 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(
                     static_cast<unsigned>(__cvta_generic_to_shared(to))),
                 "l"(__cvta_generic_to_global(from)), "n"(size)
                 : "memory");
  } else {
    *to = *from;
  }
#else
  *to = *from;
#endif
}

/// Waits for the copies of the calling thread.
__device__ inline void wait_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

}  // namespace posembed::core
