// What the functions of posembed_kernels.h share: errors as text, the caller's tensors checked, and
// the caller's threads or CUDA stream.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "core/cuda_launch.h"
#include "core/index.h"
#include "core/instruction_set.h"
#include "core/memory.h"
#include "core/position.h"
#include "posembed_kernels.h"

namespace posembed::c_interface {

// ------------------------------------------------------------------------------------------ errors

struct Refusal {
  posembed_status status;
  std::string text;
};

template <typename... Parts>
[[noreturn]] void refuse(posembed_status status, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Refusal{status, text.str()};
}

/// Refuses a value that is not as expected.
template <typename... Parts>
void expect(bool holds, const Parts&... parts) {
  if (!holds) refuse(POSEMBED_VALUE_ERROR, parts...);
}

/// Keeps a text for posembed_last_error().
void remember(const char* text);

/// Calls work(); what it throws becomes a status and a text.
template <typename Work>
posembed_status guarded(const Work& work) {
  try {
    work();
    return POSEMBED_OK;
  } catch (const Refusal& refusal) {
    remember(refusal.text.c_str());
    return refusal.status;
  } catch (const std::exception& error) {
    remember(error.what());
    return POSEMBED_RUNTIME_ERROR;
  }
}

/// A struct of a caller who may have been compiled with an older header: what his lacks is zero.
template <typename Struct>
Struct copied(const Struct* given, const char* name) {
  expect(given != nullptr, name, ": expected a struct, got NULL");
  expect(given->size >= sizeof(size_t) && given->size <= sizeof(Struct), name,
         ".size: expected its sizeof, at most ", sizeof(Struct), ", got ", given->size);
  Struct result;
  memset(&result, 0, sizeof result);
  memcpy(&result, given, given->size);
  return result;
}

// ----------------------------------------------------------------------------------------- tensors

struct View;

/// The device of all tensors of a call: that of the first.
struct Device {
  int32_t type = 0, id = 0;     // as in DLPack; type 0: there was no tensor yet
  const char* first = nullptr;  // the name of that tensor

  /// Whether the call is for CUDA kernels. The host cannot read values of its tensors.
  bool on_cuda() const { return type == 2; }
};
std::ostream& operator<<(std::ostream& out, const Device& device);

/// Prints "[2, 3]"; makes no text where nothing is refused.
struct Shape {
  const View& view;
};
std::ostream& operator<<(std::ostream& out, const Shape& shape);

/// A caller's tensor with its byte offset added and its strides filled in.
struct View {
  const char* name = nullptr;
  char* data = nullptr;
  posembed_dtype dtype{};
  int64_t rank = 0;
  int64_t size[core::max_rank] = {}, stride[core::max_rank] = {};

  int64_t last() const { return size[rank - 1]; }
  int64_t count() const;
  Shape shape() const { return {*this}; }
  bool contiguous() const;
  core::StridedMemory memory() const;
};

/// Refuses a tensor that is not on the device of the call's tensors before it.
View view(const posembed_tensor* tensor, const char* name, Device* device);

/// float32, float64, bfloat16 or float16.
core::Scalar scalar_of(const View& view);

/// int32 or int64.
core::IndexView index_view(const View& view);

/// int32, int64, float32 or float64.
core::PositionView position_view(const View& view);

void expect_shape(const View& view, const std::vector<int64_t>& shape);
void expect_dense_rows(const View& view);
void expect_same_dtype(const View& view, const View& other);

/// Memory for a result: rows are dense, elements have addresses of their own.
void expect_writable(const View& out);
void expect_apart(const View& out, const View& other);

/// A row [length] or rows [batch or 1, length]: how many, and the steps to the next batch and item.
struct Rows {
  int64_t count = 0, batch = 0, item = 0;
};
Rows expect_rows(const View& view, int64_t batch, int64_t length, int64_t first_dimension = 0);

void expect_no_overflow(int64_t offset, int64_t count, const char* name);

// --------------------------------------------------------------------------------------- execution

/// Calls kernel(stream, error), which returns the text of a CUDA error or nullptr, with the call's
/// device current. Kernels write `error`. Refuses if an earlier one has.
void launch(const Device& device, void* stream,
            const std::function<const char*(core::CudaStream, core::DeviceError*)>& kernel);

/// Calls cuda(stream, error) as launch() does, or kernel(begin, end) for parts of [0, count) on the
/// caller's threads. `cuda` is a generic lambda: without CUDA its kernel does not exist.
template <typename Kernel, typename Cuda>
void run(const Device& device, const posembed_threads& threads, int64_t count,
         int64_t bytes_per_item, const Kernel& kernel, [[maybe_unused]] const Cuda& cuda) {
  constexpr int64_t bytes_per_task = 160 * 1024;  // as the operators
  if (count == 0) return;
  if constexpr (core::built_with_cuda) {
    if (device.on_cuda()) return launch(device, threads.stream, cuda);
  }
  if (core::instruction_set() == core::InstructionSet::none) core::refuse_processor();
  const int64_t grain = std::max<int64_t>(1, bytes_per_task / std::max<int64_t>(1, bytes_per_item));
  if (threads.parallel_for == nullptr || count <= grain) return kernel(0, count);
  const auto task = [](void* work, int64_t begin, int64_t end) {
    (*static_cast<const Kernel*>(work))(begin, end);
  };
  threads.parallel_for(threads.pool, count, grain, task, const_cast<Kernel*>(&kernel));
}

inline posembed_threads threads_of(const posembed_threads* threads) {
  return threads == nullptr ? posembed_threads{} : copied(threads, "threads");
}

}  // namespace posembed::c_interface
