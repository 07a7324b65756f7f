// Around a CUDA launch: the device, its current stream, and errors that earlier kernels recorded.
// Includes no CUDA header, so operators build the same without CUDA.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "core/cuda_launch.h"
#include "dispatcher/device_errors.h"

namespace posembed::dispatcher {

/// Makes `tensor`'s device the current one while it lives. Throws c10::IndexError if an earlier
/// kernel recorded a bad id or position.
class CudaScope {
 public:
  explicit CudaScope(const at::Tensor& tensor) : guard_(tensor.device()) {
    raise_device_error();
    mark_device_used(tensor.device().index());
  }

  /// The current stream of that device.
  core::CudaStream stream() const {
    const c10::Device device = guard_.current_device();
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    return static_cast<core::CudaStream>(stream.native_handle());
  }

 private:
  c10::DeviceGuard guard_;
};

}  // namespace posembed::dispatcher
