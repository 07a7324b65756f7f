// The kernels of an optimizer's step on rows of a table. All rules are one formula with numbers of
// their own: what skipped steps owe, a first moment, a second moment of each element or of each
// row, and decoupled weight decay. Each row belongs to one worker, so threads change no bit.
#pragma once

#include <cstdint>

#include "core/cpu_kernel.h"
#include "core/cuda_launch.h"
#include "core/device_error.h"
#include "core/index.h"
#include "core/scalar.h"

namespace posembed::optim {

/// How a bfloat16 weight is rounded.
enum class Store : int8_t { nearest, stochastic, remainder };

/// With a second moment of each element:
///   first = first_decay * first + first_weight * g,  where g = gradient_scale * gradient
///   second = second_decay * second + second_weight * g * g
///   weight = keep * weight - rate * first / (sqrt(second_scale * second) + eps)
/// A second moment of a row takes the mean of its squares. Without a moment, g or 1 stands for it.
struct Numbers {
  double gradient_scale = 1.0;
  double first_decay = 0.0, first_weight = 1.0;
  double second_decay = 0.0, second_weight = 1.0, second_scale = 1.0;
  double eps = 0.0;
  double rate = 0.0;
  double keep = 1.0;
};

struct Arguments {
  void* weight = nullptr;  // [rows, dim], rows weight_stride apart
  core::Scalar scalar = core::Scalar::float32;
  int64_t rows = 0, dim = 0;
  int64_t weight_stride = 0;
  core::IndexView ids;             // [count], ascending; data == nullptr: rows 0, 1, …
  const void* gradient = nullptr;  // [count, dim], rows gradient_stride apart
  int64_t gradient_stride = 0;
  bool wide_gradient = false;  // float32 for a weight in bfloat16
  int64_t count = 0;
  // State in float32 (float64 for float64), contiguous; nullptr: the rule has none.
  void* first = nullptr;   // [rows, dim]
  void* second = nullptr;  // [rows, dim], or [rows] if second_of_rows
  bool second_of_rows = false;
  const void* owed = nullptr;  // [count, 3]: Owed of each row; nullptr: nothing is owed
  Numbers numbers;
  Store store = Store::nearest;
  int16_t* remainder =
      nullptr;            // [rows, dim]: the float32 weight minus `weight`, in its last places
  uint64_t key = 0;       // of random bits
  int64_t first_row = 0;  // of the table among random bits, if it is a shard
  core::DeviceError* error = nullptr;  // CUDA: records rows outside, or not in order
};

/// Steps on rows [begin, end) of `gradient`. Ids must have been checked.
POSEMBED_CPU_KERNEL(step, void(const Arguments& arguments, int64_t begin, int64_t end));

/// Steps on all rows; leaves out a row that is outside the table or not above the one before.
const char* step_cuda(const Arguments& arguments, core::CudaStream stream);

}  // namespace posembed::optim
