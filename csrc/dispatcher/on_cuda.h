// Which of an operator's halves computes. tests/cpp/cuda_on_cpu/dispatcher has another answer:
// there the CUDA half is tested without a GPU.
#pragma once

#include <ATen/core/Tensor.h>

namespace posembed::dispatcher {

/// Whether CUDA kernels compute with tensors of `device`.
inline bool on_cuda(c10::Device device) { return device.is_cuda(); }

/// Whether CUDA kernels compute with `tensor`.
inline bool on_cuda(const at::Tensor& tensor) { return tensor.is_cuda(); }

}  // namespace posembed::dispatcher
