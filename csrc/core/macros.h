// Qualifiers of small functions shared by host and device code. The functions are static, so that
// each instruction set's copy of a kernel file has its own: otherwise the linker could give AVX-512
// code to a processor without it.
#pragma once

#if defined(__CUDACC__)
#define POSEMBED_INLINE static __host__ __device__ __forceinline__
#else
#define POSEMBED_INLINE [[maybe_unused]] static inline __attribute__((always_inline))
#endif

#define POSEMBED_RESTRICT __restrict__
