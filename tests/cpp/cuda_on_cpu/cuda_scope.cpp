// In place of csrc/dispatcher/cuda_scope.cpp: every device computes with CUDA kernels, on the CPU,
// which has no streams.
#include "dispatcher/cuda_scope.h"

namespace posembed::dispatcher {

bool on_cuda(c10::Device) { return true; }

CudaScope::CudaScope(const at::Tensor& tensor) : guard_(tensor.device()) { raise_device_error(); }

core::CudaStream CudaScope::stream() const { return nullptr; }

}  // namespace posembed::dispatcher
