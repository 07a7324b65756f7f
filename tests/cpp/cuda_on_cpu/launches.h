// Counts launches of kernels.
#pragma once

#include <cstdint>

namespace cuda_on_cpu {

inline int64_t launches = 0;

}  // namespace cuda_on_cpu
