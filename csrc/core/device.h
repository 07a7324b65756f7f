// CUDA devices as the host uses them. What the device's driver does exists in CUDA builds only.
#pragma once

#include <cstddef>
#include <string>

#include "core/cuda_launch.h"

namespace posembed::core {

/// Makes a CUDA device the calling thread's current one, and in the end the former again.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

  /// Why the device is not current; nullptr if it is.
  const char* error() const { return error_; }

 private:
  int former_ = -1;  // -1: there is nothing to restore
  const char* error_ = nullptr;
};

/// Waits for all kernels of the current device. Returns nullptr, or the text of a CUDA error.
const char* wait_for_device();

/// The driver that these kernels need, "R580 or newer", if the one of this machine is older or
/// there is none; otherwise nullptr.
const char* missing_driver();

// ----------------------------------------------------------------------------------- pinned memory
// Host memory that CUDA devices read and write.

/// Zeroed, pinned memory, mapped into every device's address space. Null if CUDA cannot allocate
/// it. Exists in CUDA builds only.
void* allocate_pinned(std::size_t bytes);

/// Memory that was pinned where it is.
struct Pinned {
  void* on_device = nullptr;    // its address in the current device's kernels; null: not pinned
  bool owned = false;           // unpin() has to be called, as often as it was pinned
  const char* error = nullptr;  // why it was not pinned
};

/// Pins memory, unless it is, and maps it into every device's address space. Exists in CUDA builds
/// only.
Pinned pin(void* memory, std::size_t bytes);

/// Waits for the current device's kernels, which may still read the memory. The last call unpins.
void unpin(void* memory);

// ------------------------------------------------------------------------------------------ errors
// The errors of CUDA calls: operators and C calls share one record for each device.

inline constexpr int max_devices = 128;  // torch counts as many

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
