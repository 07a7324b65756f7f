#include <cuda_runtime_api.h>

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

}  // namespace posembed::core
