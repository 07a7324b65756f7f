// Qualifiers of the small functions that kernels share between host and device.
// They are static: each instruction set's copy of a kernel file must keep its own, or the linker
// could hand AVX-512 code to an older processor.
#pragma once

#if defined(__CUDACC__)
#define POSEMBED_INLINE static __host__ __device__ __forceinline__
#else
#define POSEMBED_INLINE [[maybe_unused]] static inline __attribute__((always_inline))
#endif

#define POSEMBED_RESTRICT __restrict__
