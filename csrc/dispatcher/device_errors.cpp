#include "dispatcher/device_errors.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <mutex>
#include <string>

#include "core/cuda_launch.h"
#include "core/pinned_memory.h"
#include "dispatcher/cuda_scope.h"
#include "posembed/errors.h"

namespace posembed::dispatcher {
namespace {

const char* name(core::ErrorKind kind) {
  switch (kind) {
    case core::ErrorKind::token_id:
      return "token id";
    case core::ErrorKind::token_type:
      return "token type";
    case core::ErrorKind::distance:
      return "distance between a query and a key";
    case core::ErrorKind::slot:
      return "slot";
    case core::ErrorKind::bag_offset:
      return "bag offset";
    default:
      return "position";
  }
}

std::string expectation(const core::DeviceError& error) {
  if (error.kind == core::ErrorKind::distance) return "-2147483647 to 2147483647";
  if (error.kind == core::ErrorKind::bag_offset) {
    return "0, then no less than the offset before, at most " + std::to_string(error.limit);
  }
  if (error.limit < 0 && error.value == -1) {
    return "-1 (leave the token as it is) on all axes of a token or on none";
  }
  if (error.limit < 0) return "-1 (leave the token as it is) or more";
  const bool may_skip = error.kind == core::ErrorKind::slot;
  return (may_skip ? "-1 (skip the token) or 0 to " : "0 to ") + std::to_string(error.limit - 1);
}

std::atomic<uint32_t>& state_of(core::DeviceError& error) {
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
  return reinterpret_cast<std::atomic<uint32_t>&>(error.state);
}

struct DeviceState {
  std::once_flag is_made;
  // Null until the first launch: a process that never uses CUDA must not start the driver.
  std::atomic<core::DeviceError*> record{nullptr};
  // Waiting for a device that is not in use would start the driver there, which takes memory.
  std::atomic<bool> is_used{false};
};

constexpr size_t max_devices = std::numeric_limits<c10::DeviceIndex>::max() + 1;
std::array<DeviceState, max_devices> devices;
std::atomic<size_t> devices_end{0};  // after the last that is in use

/// A device without an index counts as device 0.
DeviceState& state_of(c10::DeviceIndex device) {
  const size_t index = static_cast<size_t>(std::max<c10::DeviceIndex>(device, 0));
  size_t end = devices_end.load(std::memory_order_relaxed);
  while (end <= index && !devices_end.compare_exchange_weak(end, index + 1)) continue;
  return devices[index];
}

core::DeviceError* make_record([[maybe_unused]] c10::Device device) {
  core::DeviceError* record = nullptr;
  if constexpr (core::built_with_cuda) {
    const c10::DeviceGuard guard(device);  // otherwise the driver would start on the current one
    record = static_cast<core::DeviceError*>(core::allocate_pinned(sizeof(core::DeviceError)));
    TORCH_CHECK(record != nullptr, "posembed: CUDA gave no pinned memory for errors of kernels");
  }
  return record;
}

void raise_error_of(size_t device) {
  core::DeviceError* error = devices[device].record.load();
  if (error == nullptr || state_of(*error).load(std::memory_order_relaxed) != 2) return;
  uint32_t complete = 2;  // becomes 3, being read, because other threads may ask too
  if (!state_of(*error).compare_exchange_strong(complete, 3, std::memory_order_acquire)) return;
  const core::DeviceError found = *error;
  state_of(*error).store(0, std::memory_order_release);
  TORCH_CHECK_INDEX(false, name(found.kind), " ", found.value, " at index ", found.index,
                    " of an earlier call on cuda:", device, " is out of range: expected ",
                    expectation(found), ". Its row was written as zeros, or left as it was.");
}

}  // namespace

core::DeviceError* device_error(c10::Device device) {
  if (!on_cuda(device)) return nullptr;
  DeviceState& state = state_of(device.index());
  std::call_once(state.is_made, [&] { state.record = make_record(device); });
  return state.record;
}

void mark_device_used(c10::DeviceIndex device) {
  state_of(device).is_used.store(true, std::memory_order_relaxed);
}

void raise_device_error() {
  for (size_t device = 0; device < devices_end; ++device) raise_error_of(device);
}

void check_errors(bool wait) {
  for (size_t device = 0; wait && device < devices_end; ++device) {
    if (!devices[device].is_used) continue;
    const c10::Device current(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device));
    // Waiting restores the device that was current before, which would start the driver there.
    const c10::DeviceGuard guard(current);
    c10::impl::VirtualGuardImpl(current.type()).synchronizeDevice(current.index());
  }
  raise_device_error();
}

}  // namespace posembed::dispatcher

void posembed::check_errors(bool wait) { posembed::dispatcher::check_errors(wait); }
