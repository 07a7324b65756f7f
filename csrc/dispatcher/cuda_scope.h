// The scope of a CUDA launch: its device and stream, and errors that earlier kernels recorded.
// Includes no CUDA header, so operators build the same without CUDA. For make test-cuda-on-cpu,
// tests/cpp/cuda_on_cpu/cuda_scope.cpp makes the CPU the device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include "core/cuda_launch.h"
#include "dispatcher/device_errors.h"

namespace posembed::dispatcher {

/// Whether CUDA kernels process tensors on `device`.
bool on_cuda(c10::Device device);

/// Whether CUDA kernels process `tensor`. Use `on_cuda(tensor)`, never `tensor.is_cuda`: in some
/// tests the CPU replaces the CUDA device.
inline bool on_cuda(const at::Tensor& tensor) { return on_cuda(tensor.device()); }

/// Waits for all kernels of a CUDA device that is in use.
void wait_for_device(int device);

/// Makes `tensor`'s device current for the lifetime of this object. Throws c10::IndexError if an
/// earlier kernel recorded a bad id or position.
class CudaScope {
 public:
  explicit CudaScope(const at::Tensor& tensor);

  /// The current stream of that device.
  core::CudaStream stream() const;

 private:
  c10::DeviceGuard guard_;
};

}  // namespace posembed::dispatcher
