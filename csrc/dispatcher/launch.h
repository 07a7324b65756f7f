// Runs a kernel on its tensors' device: on CUDA, or on the CPU's threads. Names it for profilers.
// Copies numbers from C++ to a tensor on any device. Includes no CUDA header, so operators build
// the same without CUDA.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <torch/types.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "core/cuda_launch.h"

// Wraps a CUDA launcher as an argument of launch(). Use its name only inside `if constexpr`,
// because it does not exist without CUDA.
#define POSEMBED_CUDA_LAUNCHER(launcher)                                                 \
  [](const auto& arguments, ::posembed::core::CudaStream stream) -> const char* {        \
    if constexpr (::posembed::core::built_with_cuda) return launcher(arguments, stream); \
    return nullptr;                                                                      \
  }

namespace posembed::dispatcher {

// ------------------------------------------------------------------------------------------ errors
// Of CUDA calls: failed launches, and bad ids and positions. Kernels record the latter and
// continue; the host throws them at the next call or in posembed.check_errors().

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

// ------------------------------------------------------------------------------------------- scope
// The device and stream of a CUDA launch. For make test-cuda-on-cpu, tests/cpp/cuda_on_cpu/
// cuda_scope.cpp makes the CPU the device.

/// Whether CUDA kernels process tensors on `device`.
bool on_cuda(c10::Device device);

/// Whether CUDA kernels process `tensor`. Use `on_cuda(tensor)`, never `tensor.is_cuda`: in some
/// tests the CPU replaces the CUDA device.
inline bool on_cuda(const at::Tensor& tensor) { return on_cuda(tensor.device()); }

/// Waits for all kernels of a CUDA device that is in use.
void wait_for_device(int device);

/// Makes `tensor`'s device current for the lifetime of this object. Throws c10::IndexError if an
/// earlier kernel recorded a bad id or position.
class CudaScope {
 public:
  explicit CudaScope(const at::Tensor& tensor);

  /// The current stream of that device.
  core::CudaStream stream() const;

 private:
  c10::DeviceGuard guard_;
};

// ------------------------------------------------------------------------------------------ launch

/// Work on fewer bytes takes less time than waking a second thread.
inline constexpr int64_t bytes_per_task = 160 * 1024;

/// Calls `kernel(begin, end)` on parts of [0, count), or once on the calling thread if the work is
/// small.
template <typename Kernel>
void parallel_for(int64_t count, int64_t bytes_per_item, const Kernel& kernel) {
  const int64_t grain = std::max<int64_t>(1, bytes_per_task / std::max<int64_t>(1, bytes_per_item));
  if (count <= grain) {
    if (count > 0) kernel(int64_t{0}, count);
  } else {
    at::parallel_for(0, count, grain, kernel);
  }
}

/// While a profiler runs, a range in its record, from here to the end of the scope, for the way
/// that a kernel takes; `name` gives its name and is not called otherwise.
class ProfiledRange {
 public:
  template <typename Name>
  explicit ProfiledRange(const Name& name) {
    auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
    if (C10_LIKELY(!callbacks.has_value())) return;
    range_.emplace(std::move(*callbacks));
    range_->before(name());
  }

 private:
  std::optional<at::RecordFunction> range_;
};

/// Calls `cuda` on the current stream of `tensor`'s device, or `cpu` for all `count` items.
template <typename Arguments, typename Cpu, typename Cuda>
void launch(const Arguments& arguments, const at::Tensor& tensor, int64_t count,
            int64_t bytes_per_item, const Cpu& cpu, [[maybe_unused]] const Cuda& cuda) {
  if (on_cuda(tensor)) {
    if constexpr (core::built_with_cuda) {
      const CudaScope scope(tensor);
      check_launch(cuda(arguments, scope.stream()));
    }
    return;
  }
  parallel_for(count, bytes_per_item,
               [&](int64_t begin, int64_t end) { cpu(arguments, begin, end); });
}

/// A float32 tensor of the given sizes. CUDA graphs can capture the copy.
inline at::Tensor floats_on(c10::Device device, at::ArrayRef<float> values, at::IntArrayRef sizes) {
  at::Tensor out = at::empty(sizes, at::TensorOptions(at::kFloat).device(device));
  if (out.is_meta()) return out;
  if constexpr (core::built_with_cuda) {
    if (on_cuda(out)) {
      const CudaScope scope(out);
      check_launch(core::write_floats_cuda(values.data(), out.numel(),
                                           out.mutable_data_ptr<float>(), scope.stream()));
      return out;
    }
  }
  at::Tensor host = out.is_cpu() ? out : at::empty(sizes, at::kFloat);
  std::copy(values.begin(), values.end(), host.mutable_data_ptr<float>());
  return host.to(device);
}

}  // namespace posembed::dispatcher
