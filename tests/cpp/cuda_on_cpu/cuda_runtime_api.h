// The header for host code that includes only the CUDA runtime's functions.
#pragma once

#include "cuda_runtime.h"
