// Copies numbers from the host to a device as kernel arguments, because a CUDA graph can capture
// those but not a copy from pageable memory.
#pragma once

#include <cstdint>

#include "core/cuda_launch.h"

namespace posembed::core {

/// Writes `count` numbers to device memory. Returns nullptr, or the text of a CUDA error. Exists in
/// CUDA builds only.
const char* write_floats_cuda(const float* values, int64_t count, float* out, CudaStream stream);

}  // namespace posembed::core
