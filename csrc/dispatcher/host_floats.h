// Numbers that C++ code computed, as a tensor on any device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace posembed::dispatcher {

/// float32 of the given sizes. CUDA graphs capture it.
at::Tensor floats_on(c10::Device device, at::ArrayRef<float> values, at::IntArrayRef sizes);

}  // namespace posembed::dispatcher
