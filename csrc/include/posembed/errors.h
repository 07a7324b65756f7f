/// Errors that CUDA kernels record: bad ids and positions.
#pragma once

#include "posembed/export.h"

namespace posembed {

/// Waits for the CUDA devices and raises the first id or position error that a kernel recorded.
///
/// A kernel that meets a bad id or position writes zeros (or leaves the token unchanged) and
/// continues; the error is raised here or at posembed's next CUDA call, and the CUDA context stays
/// usable.
/// @param wait  whether to wait for the devices. Without waiting, errors of kernels that still run
///     are missed; use this in loops that replay a CUDA graph and must not stall.
/// @throws c10::IndexError names what was out of range, its value, its index, device and range
///
///     embed->forward(ids);
///     posembed::check_errors();
POSEMBED_API void check_errors(bool wait = true);

}  // namespace posembed
