// Replaces csrc/dispatcher/cuda_scope.cpp: CUDA kernels run for every device, on the CPU, without
// streams.
#include "dispatcher/launch.h"

namespace posembed::dispatcher {

bool on_cuda(c10::Device) { return true; }

void wait_for_device(int) {}

CudaScope::CudaScope(const at::Tensor& tensor) : guard_(tensor.device()) { raise_device_error(); }

core::CudaStream CudaScope::stream() const { return nullptr; }

}  // namespace posembed::dispatcher
