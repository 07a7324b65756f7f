// Types for CUDA launches, shared by CUDA kernels and operators, which include no CUDA header.
#pragma once

struct CUstream_st;

namespace posembed::core {

/// The type behind cudaStream_t.
using CudaStream = CUstream_st*;

#if defined(POSEMBED_WITH_CUDA)
inline constexpr bool built_with_cuda = true;
#else
inline constexpr bool built_with_cuda = false;
#endif

}  // namespace posembed::core
