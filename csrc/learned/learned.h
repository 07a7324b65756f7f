// The learned-position kernels: add rows of a table to x at consecutive or given positions. Plain
// look-ups, and the gradient for given positions, use the token table's kernels.
#pragma once

#include <cstdint>

#include "core/cuda_launch.h"
#include "core/index.h"
#include "core/instruction_set.h"
#include "core/scalar.h"

namespace posembed::learned {

/// out[b, s] = x[b, s] + weight[position + first_row].
struct AddArguments {
  const void* x = nullptr;       // [batch, seq, embedding_dim], last dimension contiguous
  const void* weight = nullptr;  // [rows, embedding_dim], rows weight_stride apart
  void* out = nullptr;           // [batch, seq, embedding_dim], contiguous
  core::Scalar scalar = core::Scalar::float32;
  int64_t batch = 0, seq = 0, embedding_dim = 0;
  int64_t x_stride[2] = {0, 0};  // batch, seq; in elements
  int64_t rows = 0;
  int64_t weight_stride = 0;
  core::IndexView positions;            // data == nullptr: offset, offset + 1, …
  int64_t position_stride[2] = {0, 0};  // batch, seq; in elements
  int64_t offset = 0;
  int64_t first_row = 0;               // the row of position 0
  core::DeviceError* error = nullptr;  // CUDA: where a position outside the table is recorded
};

/// Tokens are numbered seq index * batch + batch index, so that neighbours share a position's row;
/// adds tokens [begin, end). Positions must have been checked.
POSEMBED_CPU_KERNEL(add, void(const AddArguments& arguments, int64_t begin, int64_t end));

/// Adds all tokens on `stream`; out is zeros where a position is outside the table.
const char* add_cuda(const AddArguments& arguments, core::CudaStream stream);

/// The table's gradient for consecutive positions: row p of out = sum over b of gradient[b, p].
struct SumArguments {
  const void* gradient = nullptr;  // [batch, seq, embedding_dim], contiguous
  void* out = nullptr;             // [seq, embedding_dim], contiguous
  core::Scalar scalar = core::Scalar::float32;
  int64_t batch = 0, seq = 0, embedding_dim = 0;
};

/// Sums seq indices [begin, end).
POSEMBED_CPU_KERNEL(sum_batch, void(const SumArguments& arguments, int64_t begin, int64_t end));

const char* sum_batch_cuda(const SumArguments& arguments, core::CudaStream stream);

}  // namespace posembed::learned
