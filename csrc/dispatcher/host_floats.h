// Copies numbers from C++ to a tensor on any device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace posembed::dispatcher {

/// A float32 tensor of the given sizes. CUDA graphs can capture the copy.
at::Tensor floats_on(c10::Device device, at::ArrayRef<float> values, at::IntArrayRef sizes);

}  // namespace posembed::dispatcher
