// Errors of CUDA calls: launches that failed, and bad ids and positions that kernels met, which are
// recorded without stopping the kernel and thrown on the host at the next call or by
// posembed.check_errors().
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include "core/device_error.h"

namespace posembed::dispatcher {

/// The record that kernels on `device` write: pinned memory that every device can reach. Null on
/// the CPU.
core::DeviceError* device_error(c10::Device device);

/// Throws c10::IndexError for the recorded error, if there is one, and clears it. Does not wait for
/// kernels that still run.
void raise_device_error();

/// Throws if a launch returned the text of a CUDA error.
inline void check_launch(const char* error) {
  TORCH_CHECK(error == nullptr, "posembed: a CUDA kernel could not be launched: ", error);
}

/// Notes that kernels were launched on a CUDA device.
void mark_device_used(c10::DeviceIndex device);

/// Waits for every device that was used, then throws as above: the operator posembed::check_errors.
void check_errors();

}  // namespace posembed::dispatcher
