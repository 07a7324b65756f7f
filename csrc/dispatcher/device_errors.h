// Bad ids and positions that CUDA kernels met: recorded without stopping anything, raised on the
// host at the next call or by posembed.check_errors().
#pragma once

#include <c10/core/Device.h>

#include "core/device_error.h"

namespace posembed::dispatcher {

/// Where kernels record: pinned memory that every device can write. Null in a CPU-only build.
core::DeviceError* device_error();

/// Raises IndexError for the recorded error, if there is one, and clears it. Waits for nothing:
/// kernels in flight may still record.
void raise_device_error();

/// Notes that kernels run on a CUDA device.
void use_device(c10::DeviceIndex device);

/// Waits for every device that was used, then raises as above: the operator posembed::check_errors.
void check_errors();

}  // namespace posembed::dispatcher
