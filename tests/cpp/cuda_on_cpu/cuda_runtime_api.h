// What host code that includes no more than the CUDA runtime's functions finds here.
#pragma once

#include "cuda_runtime.h"
