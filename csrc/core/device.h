// CUDA devices of calls without torch, which has guards of its own. In CUDA builds only.
#pragma once

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

}  // namespace posembed::core
