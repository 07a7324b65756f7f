// The errors of CUDA calls: operators and C calls share one record for each device.
#pragma once

#include <string>

#include "core/device_error.h"

namespace posembed::core {

/// The record that kernels on a CUDA device write, if it was made. One per device, because atomic
/// operations on host memory are atomic only among kernels of one GPU.
DeviceError* known_error_record(int device);

/// The same, made where it was not, on the current device. Null if CUDA gives no pinned memory.
DeviceError* error_record(int device);

/// Notes that kernels were launched on a CUDA device.
void mark_device_used(int device);
bool is_device_used(int device);

/// Above the number of each device that has a record or is in use.
int devices_end();

/// Text of an error that a kernel recorded on any device, and clears it; empty if there is none.
/// Does not wait for kernels that still run.
std::string take_device_error();

/// What to tell about a CUDA call that failed: the driver that is needed, if that is why, otherwise
/// `error`.
std::string cuda_failure(const char* error);

}  // namespace posembed::core
