// The ALiBi kernels: the bias itself, the bias added to attention scores, and the gradient of the
// slopes. Press, Smith, Lewis, "Train Short, Test Long: Attention with Linear Biases", 2022.
#pragma once

#include <cstdint>

#include "core/cpu_kernel.h"
#include "core/cuda_launch.h"
#include "core/scalar.h"

namespace posembed::alibi {

/// One number per head; with two sides, a second row holds those for keys after the query.
struct Slopes {
  const void* data = nullptr;  // [sides, heads], contiguous
  core::Scalar scalar = core::Scalar::float32;
  int64_t heads = 0;
  int64_t sides = 1;
};

/// Query row r is at position offset + r, key column k at position k. Their distances fit in 31
/// bits.
struct Distances {
  int64_t queries = 0;
  int64_t keys = 0;
  int64_t offset = 0;
  bool causal = true;
  bool hide_future = true;  // causal: keys after the query get -infinity, otherwise 0
};

struct FillArguments {
  Slopes slopes;
  Distances distances;
  void* out = nullptr;  // [heads, queries, keys], contiguous
  core::Scalar scalar = core::Scalar::float32;
};

/// Scores [batch, heads, queries, keys] with a contiguous last dimension. `in == out` adds in
/// place.
struct AddArguments {
  Slopes slopes;
  Distances distances;
  const void* in = nullptr;
  void* out = nullptr;
  core::Scalar scalar = core::Scalar::float32;
  int64_t batch = 0;
  int64_t in_stride[3] = {0, 0, 0};  // batch, head, query; in elements
  int64_t out_stride[3] = {0, 0, 0};
};

/// The gradient of the slopes is the gradient of the bias, weighted by distance and summed up.
struct ReduceArguments {
  Distances distances;
  int64_t sides = 1;
  int64_t heads = 0;
  const void* grad = nullptr;  // [batch, heads, queries, keys] with a contiguous last dimension
  core::Scalar scalar = core::Scalar::float32;
  int64_t batch = 0;
  int64_t stride[3] = {0, 0, 0};  // batch, head, query; in elements
  void* out = nullptr;            // [sides, heads], contiguous
  core::Scalar out_scalar = core::Scalar::float32;
  double* partial = nullptr;  // CUDA: room for [sides, heads, queries], the sums of single rows
};

/// Rows are numbered head * queries + query; fills rows [begin, end).
POSEMBED_CPU_KERNEL(fill, void(const FillArguments& arguments, int64_t begin, int64_t end));

/// Rows are numbered (batch * heads + head) * queries + query; adds to rows [begin, end).
POSEMBED_CPU_KERNEL(add, void(const AddArguments& arguments, int64_t begin, int64_t end));

/// Reduces heads [begin, end). The order of summation is fixed: the same bits for any split of the
/// heads and any instruction set.
POSEMBED_CPU_KERNEL(reduce, void(const ReduceArguments& arguments, int64_t begin, int64_t end));

/// All rows on `stream`. They return nullptr, or the text of a CUDA error.
const char* fill_cuda(const FillArguments& arguments, core::CudaStream stream);
const char* add_cuda(const AddArguments& arguments, core::CudaStream stream);
const char* reduce_cuda(const ReduceArguments& arguments, core::CudaStream stream);

/// Writes `count` host numbers to device memory as kernel arguments: no copy that a CUDA graph
/// would refuse.
const char* write_slopes_cuda(const float* slopes, int64_t count, float* out,
                              core::CudaStream stream);

}  // namespace posembed::alibi
