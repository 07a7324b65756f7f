#include <cuda_runtime_api.h>

#include <cstring>

#include "core/pinned_memory.h"

namespace posembed::core {

void* allocate_pinned(std::size_t bytes) {
  void* memory = nullptr;
  const unsigned flags = cudaHostAllocPortable | cudaHostAllocMapped;
  // The first call may come while a graph is captured, which by default forbids allocation.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  const cudaError_t error = cudaHostAlloc(&memory, bytes, flags);
  cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) {
    cudaGetLastError();  // clears the error, or the next launch would report it
    return nullptr;
  }
  std::memset(memory, 0, bytes);
  return memory;
}

Pinned pin(void* memory, std::size_t bytes) {
  const unsigned flags = cudaHostRegisterPortable | cudaHostRegisterMapped;
  cudaError_t error = cudaHostRegister(memory, bytes, flags);
  const bool owned = error == cudaSuccess;
  if (owned || error == cudaErrorHostMemoryAlreadyRegistered) {
    void* on_device = nullptr;
    error = cudaHostGetDevicePointer(&on_device, memory, 0);
    if (error == cudaSuccess) return {on_device, owned, nullptr};
    if (owned) unpin(memory);
  }
  cudaGetLastError();  // clears the error, or the next launch would report it
  return {nullptr, false, cudaGetErrorString(error)};
}

void unpin(void* memory) {
  if (cudaHostUnregister(memory) != cudaSuccess) cudaGetLastError();
}

}  // namespace posembed::core
