#include <cuda_runtime_api.h>

#include <cstring>

#include "core/pinned_memory.h"

namespace posembed::core {

void* allocate_pinned(std::size_t bytes) {
  void* memory = nullptr;
  const unsigned flags = cudaHostAllocPortable | cudaHostAllocMapped;
  if (cudaHostAlloc(&memory, bytes, flags) != cudaSuccess) return nullptr;
  std::memset(memory, 0, bytes);
  return memory;
}

}  // namespace posembed::core
