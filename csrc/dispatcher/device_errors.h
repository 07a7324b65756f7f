// Bad ids and positions that CUDA kernels met: recorded without stopping the kernel, thrown on the
// host at the next call or by posembed.check_errors().
#pragma once

#include <c10/core/Device.h>

#include "core/device_error.h"

namespace posembed::dispatcher {

/// The record that kernels on `device` write: pinned memory that every device can reach. Null on
/// the CPU.
core::DeviceError* device_error(c10::Device device);

/// Throws c10::IndexError for the recorded error, if there is one, and clears it. Does not wait for
/// kernels that still run.
void raise_device_error();

/// Notes that kernels were launched on a CUDA device.
void mark_device_used(c10::DeviceIndex device);

/// Waits for every device that was used, then throws as above: the operator posembed::check_errors.
void check_errors();

}  // namespace posembed::dispatcher
