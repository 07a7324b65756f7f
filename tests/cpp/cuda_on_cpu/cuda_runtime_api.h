// The header for host code that includes only the CUDA runtime's functions.
#pragma once

#include "cuda_runtime.h"

#define CUDART_VERSION 13000

inline constexpr cudaError_t cudaErrorInvalidDevice = 101;

/// There is one device.
inline cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }

inline int pretended_driver = CUDART_VERSION;
inline cudaError_t cudaDriverGetVersion(int* version) { return *version = pretended_driver, cudaSuccess; }
