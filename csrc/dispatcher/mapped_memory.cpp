#include "posembed/mapped_memory.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include "core/cuda_launch.h"
#include "core/pinned_memory.h"
#include "dispatcher/cuda_scope.h"

namespace posembed {

torch::Tensor mapped(const torch::Tensor& table, torch::Device device) {
  TORCH_CHECK_VALUE(table.is_cpu() && table.is_contiguous(), "table: expected a contiguous tensor ",
                    "on the CPU, got one on ", table.device());
  TORCH_CHECK_VALUE(device.is_cpu() || (core::built_with_cuda && device.type() == at::kCUDA),
                    "device: expected the CPU", core::built_with_cuda ? " or a CUDA device" : "",
                    ", got ", device);
  if (!dispatcher::on_cuda(device) || table.numel() == 0) return table.to(device);
  if constexpr (core::built_with_cuda) {
    const torch::Tensor kept = table.detach();
    if (device.type() == at::kCUDA && !device.has_index()) {
      device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
    }
    const c10::DeviceGuard guard(device);
    void* const host = kept.data_ptr();
    const core::Pinned pinned = core::pin(host, kept.nbytes());
    TORCH_CHECK_VALUE(pinned.on_device != nullptr, "table: cannot pin ", kept.nbytes(),
                      " bytes: ", pinned.error);
    const auto release = [kept, host, device, owned = pinned.owned](void*) {
      if (!owned) return;
      try {
        const c10::DeviceGuard on_device(device);
        core::unpin(host);
      } catch (const c10::Error&) {  // the driver is gone: the process ends
      }
    };
    return at::from_blob(pinned.on_device, kept.sizes(), kept.strides(), release,
                         kept.options().device(device));
  }
  return table;
}

}  // namespace posembed
