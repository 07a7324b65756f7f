#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>

#include "core/pinned_memory.h"

namespace posembed::core {
namespace {

/// Memory that was pinned here, and how often.
struct Pins {
  std::mutex mutex;
  std::map<void*, int64_t> counts;
};

Pins& pins = *new Pins;  // views may be freed when static objects are gone

}  // namespace

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
  const std::lock_guard<std::mutex> lock(pins.mutex);
  const unsigned flags = cudaHostRegisterPortable | cudaHostRegisterMapped;
  cudaError_t error = cudaHostRegister(memory, bytes, flags);
  const bool is_new = error == cudaSuccess, owned = is_new || pins.counts.count(memory) > 0;
  void* on_device = nullptr;
  if (is_new || error == cudaErrorHostMemoryAlreadyRegistered) {
    error = cudaHostGetDevicePointer(&on_device, memory, 0);
  }
  cudaGetLastError();  // clears the error, or the next launch would report it
  if (error == cudaSuccess) {
    if (owned) ++pins.counts[memory];
    return {on_device, owned, nullptr};
  }
  if (is_new) cudaHostUnregister(memory);
  return {nullptr, false, cudaGetErrorString(error)};
}

void unpin(void* memory) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // as in allocate_pinned()
  cudaThreadExchangeStreamCaptureMode(&mode);
  cudaDeviceSynchronize();
  const std::lock_guard<std::mutex> lock(pins.mutex);
  if (--pins.counts[memory] == 0) {
    pins.counts.erase(memory);
    cudaHostUnregister(memory);
  }
  cudaThreadExchangeStreamCaptureMode(&mode);
  cudaGetLastError();
}

}  // namespace posembed::core
