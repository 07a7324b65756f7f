#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>

#include "core/device.h"
#include "core/device_vector.h"

namespace posembed::core {

DeviceScope::DeviceScope(int device) {
  int current = 0;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && current != device) {
    error = cudaSetDevice(device);
    if (error == cudaSuccess) former_ = current;
  }
  error_ = text_of(error);
  if (error_ != nullptr) cudaGetLastError();  // clears it, or the next launch would report it
}

DeviceScope::~DeviceScope() {
  if (former_ >= 0) cudaSetDevice(former_);
}

const char* wait_for_device() { return text_of(cudaDeviceSynchronize()); }

const char* missing_driver() {
  int version = 0;
  cudaDriverGetVersion(&version);
  // Within a major version of CUDA, an older driver runs what a newer toolkit compiled.
  if (version / 1000 >= CUDART_VERSION / 1000) return nullptr;
  if (CUDART_VERSION >= 14000)
    return "that of the CUDA toolkit, which build_info() names, or newer";
  return CUDART_VERSION >= 13000 ? "R580 or newer" : "R530 or newer";
}

// ----------------------------------------------------------------------------------------- numbers

namespace {

constexpr int64_t max_floats = 512;  // per launch: kernels can take at least 4 KiB of arguments
constexpr int block_size = 128;

struct FloatBlock {
  float values[max_floats];
};

__global__ void write_floats_kernel(FloatBlock block, int64_t count, float* out) {
  for (int64_t i = threadIdx.x; i < count; i += block_size) out[i] = block.values[i];
}

}  // namespace

const char* write_floats_cuda(const float* values, int64_t count, float* out, CudaStream stream) {
  for (int64_t done = 0; done < count; done += max_floats) {
    FloatBlock block;
    const int64_t size = std::min(max_floats, count - done);
    std::copy_n(values + done, size, block.values);
    const char* error =
        checked_launch(write_floats_kernel, 1, block_size, 0, stream, block, size, out + done);
    if (error != nullptr) return error;
  }
  return nullptr;
}

// ----------------------------------------------------------------------------------- pinned memory

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
