#include "dispatcher/device_errors.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <string>

#include "core/cuda_launch.h"
#include "core/device_errors.h"
#include "dispatcher/cuda_scope.h"
#include "posembed/errors.h"

namespace posembed::dispatcher {
namespace {

/// A device without an index counts as device 0.
int number_of(c10::DeviceIndex device) { return std::max<int>(device, 0); }

}  // namespace

core::DeviceError* device_error(c10::Device device) {
  if (!core::built_with_cuda || !on_cuda(device)) return nullptr;
  const int number = number_of(device.index());
  if (core::DeviceError* known = core::known_error_record(number)) return known;
  const c10::DeviceGuard guard(device);  // otherwise the driver would start on the current one
  core::DeviceError* record = core::error_record(number);
  TORCH_CHECK(record != nullptr,
              "posembed: ", core::cuda_failure("CUDA gave no pinned memory for errors of kernels"));
  return record;
}

void mark_device_used(c10::DeviceIndex device) {
  const int number = number_of(device);
  if (core::is_device_used(number)) return;
  const std::string failure = core::cuda_failure("");
  TORCH_CHECK(failure.empty(), "posembed: ", failure);
  core::mark_device_used(number);
}

void raise_device_error() {
  const std::string text = core::take_device_error();
  TORCH_CHECK_INDEX(text.empty(), text);
}

void check_errors(bool wait) {
  for (int device = 0; wait && device < core::devices_end(); ++device) {
    if (core::is_device_used(device)) wait_for_device(device);
  }
  raise_device_error();
}

}  // namespace posembed::dispatcher

void posembed::check_errors(bool wait) { posembed::dispatcher::check_errors(wait); }
