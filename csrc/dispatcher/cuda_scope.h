// Everything around a CUDA launch: the right device, its current stream, the errors that earlier
// kernels recorded. Needs no CUDA header, so operators build the same with and without CUDA.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "core/cuda_launch.h"
#include "dispatcher/device_errors.h"

namespace posembed::dispatcher {

/// Makes `tensor`'s device the current one for as long as it lives.
/// Raises IndexError where an earlier kernel recorded a bad id or position.
class CudaScope {
 public:
  explicit CudaScope(const at::Tensor& tensor) : guard_(tensor.device()) {
    raise_device_error();
    use_device(tensor.device().index());
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

/// Raises where a launch returned the text of a CUDA error.
inline void check_launch(const char* error) {
  TORCH_CHECK(error == nullptr, "posembed: a CUDA kernel could not be launched: ", error);
}

}  // namespace posembed::dispatcher
