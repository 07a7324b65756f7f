#include <array>
#include <atomic>
#include <mutex>

#include "core/device.h"

namespace posembed::core {
namespace {

const char* name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::token_id:
      return "token id";
    case ErrorKind::token_type:
      return "token type";
    case ErrorKind::distance:
      return "distance between a query and a key";
    case ErrorKind::slot:
      return "slot";
    case ErrorKind::bag_offset:
      return "bag offset";
    default:
      return "position";
  }
}

std::string expectation(const DeviceError& error) {
  if (error.kind == ErrorKind::distance) return "-2147483647 to 2147483647";
  if (error.kind == ErrorKind::bag_offset) {
    return "0, then no less than the offset before, at most " + std::to_string(error.limit);
  }
  if (error.limit < 0 && error.value == -1) {
    return "-1 (leave the token as it is) on all axes of a token or on none";
  }
  if (error.limit < 0) return "-1 (leave the token as it is) or more";
  const bool may_skip = error.kind == ErrorKind::slot;
  return (may_skip ? "-1 (skip the token) or 0 to " : "0 to ") + std::to_string(error.limit - 1);
}

std::atomic<uint32_t>& state_of(DeviceError& error) {
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
  return reinterpret_cast<std::atomic<uint32_t>&>(error.state);
}

struct DeviceState {
  // Null until the first launch: a process that never uses CUDA must not start the driver.
  std::atomic<DeviceError*> record{nullptr};
  // Waiting for a device that is not in use would start the driver there, which takes memory.
  std::atomic<bool> is_used{false};
};

std::mutex making;  // of a record
std::array<DeviceState, max_devices> devices;
std::atomic<int> end{0};

DeviceState& noted(int device) {
  int known = end.load(std::memory_order_relaxed);
  while (known <= device && !end.compare_exchange_weak(known, device + 1)) continue;
  return devices[static_cast<size_t>(device)];
}

std::string take_error_of(int device) {
  DeviceError* error = known_error_record(device);
  if (error == nullptr || state_of(*error).load(std::memory_order_relaxed) != 2) return "";
  uint32_t complete = 2;  // becomes 3, being read, because other threads may ask too
  if (!state_of(*error).compare_exchange_strong(complete, 3, std::memory_order_acquire)) return "";
  const DeviceError found = *error;
  state_of(*error).store(0, std::memory_order_release);
  return std::string(name(found.kind)) + " " + std::to_string(found.value) + " at index " +
         std::to_string(found.index) + " of an earlier call on cuda:" + std::to_string(device) +
         " is out of range: expected " + expectation(found) +
         ". Its row was written as zeros, or left as it was.";
}

}  // namespace

DeviceError* known_error_record(int device) {
  return devices[static_cast<size_t>(device)].record.load(std::memory_order_acquire);
}

DeviceError* error_record(int device) {
  const std::lock_guard<std::mutex> lock(making);
  DeviceState& state = noted(device);
  if constexpr (built_with_cuda) {
    if (state.record == nullptr) {
      state.record = static_cast<DeviceError*>(allocate_pinned(sizeof(DeviceError)));
    }
  }
  return state.record;
}

void mark_device_used(int device) { noted(device).is_used.store(true, std::memory_order_relaxed); }

bool is_device_used(int device) {
  return devices[static_cast<size_t>(device)].is_used.load(std::memory_order_relaxed);
}

int devices_end() { return end; }

std::string take_device_error() {
  for (int device = 0; device < end; ++device) {
    if (std::string text = take_error_of(device); !text.empty()) return text;
  }
  return "";
}

std::string cuda_failure(const char* error) {
  if constexpr (built_with_cuda) {
    if (const char* driver = missing_driver()) {
      return std::string("CUDA kernels of posembed need an NVIDIA driver that is ") + driver;
    }
  }
  return error;
}

}  // namespace posembed::core
