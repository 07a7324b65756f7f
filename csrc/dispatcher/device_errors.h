// Errors of CUDA calls: failed launches, and bad ids and positions. Kernels record the latter and
// continue; the host throws them at the next call or in posembed.check_errors().
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include "core/device_error.h"

namespace posembed::dispatcher {

/// The record that kernels on `device` write. One per device, because atomic operations on host
/// memory are atomic only among kernels of one GPU. Null on the CPU.
core::DeviceError* device_error(c10::Device device);

/// Throws c10::IndexError for the recorded error of a device, if there is one, and clears it. Does
/// not wait for kernels that still run.
void raise_device_error();

/// Throws if a launch returned the text of a CUDA error.
inline void check_launch(const char* error) {
  TORCH_CHECK(error == nullptr, "posembed: a CUDA kernel could not be launched: ", error);
}

/// Notes that kernels were launched on a CUDA device.
void mark_device_used(c10::DeviceIndex device);

/// The operator posembed::check_errors: waits for every device in use, if asked to, then throws as
/// above.
void check_errors(bool wait);

}  // namespace posembed::dispatcher
