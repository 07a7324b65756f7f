// In place of csrc/dispatcher/cuda_scope.h: the CPU is the device, and has no streams.
#pragma once

#include <ATen/core/Tensor.h>

#include "core/cuda_launch.h"
#include "dispatcher/device_errors.h"

namespace posembed::dispatcher {

class CudaScope {
 public:
  explicit CudaScope(const at::Tensor&) { raise_device_error(); }

  core::CudaStream stream() const { return nullptr; }
};

}  // namespace posembed::dispatcher
