#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "dispatcher/launch.h"

namespace posembed::dispatcher {

bool on_cuda(c10::Device device) { return device.is_cuda(); }

void wait_for_device(int device) {
  const c10::Device current(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device));
  // Waiting restores the device that was current before, which would start the driver there.
  const c10::DeviceGuard guard(current);
  c10::impl::VirtualGuardImpl(current.type()).synchronizeDevice(current.index());
}

CudaScope::CudaScope(const at::Tensor& tensor) : guard_(tensor.device()) {
  raise_device_error();
  mark_device_used(tensor.device().index());
}

core::CudaStream CudaScope::stream() const {
  const c10::Device device = guard_.current_device();
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  return static_cast<core::CudaStream>(stream.native_handle());
}

}  // namespace posembed::dispatcher
