// Counts launches of kernels, and keeps which kernels were launched.
#pragma once

#include <cstdint>
#include <set>

namespace cuda_on_cpu {

inline int64_t launches = 0;
inline std::set<const void*> kernels;

}  // namespace cuda_on_cpu
