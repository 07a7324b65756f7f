// The input kernels: token + type + position rows, LayerNorm or RMSNorm, dropout, in one pass each
// way. Ba et al., "Layer Normalization", 2016; Zhang and Sennrich, "Root Mean Square Layer
// Normalization", 2019. Backwards the sum is gathered again and dropout's mask drawn again: only
// mean and rstd are kept.
#pragma once

#include <cstdint>

#include "core/cpu_kernel.h"
#include "core/cuda_launch.h"
#include "core/device_error.h"
#include "core/index.h"
#include "core/scalar.h"

namespace posembed::input {

/// A table [rows, embedding_dim] of which each token takes a row; data == nullptr: there is none.
struct Table {
  const void* data = nullptr;
  int64_t rows = 0;
  int64_t stride = 0;     // between rows, in elements
  core::IndexView index;  // which row; data == nullptr: offset, offset + 1, … along the sequence
  int64_t index_stride[2] = {0, 0};  // batch, seq; in elements
  int64_t offset = 0;
  int64_t first_row = 0;  // added to every index
  core::ErrorKind kind = core::ErrorKind::token_id;
};

enum class Norm : int8_t { none, layer, rms };

/// What forward and backward have in common.
struct Arguments {
  core::Scalar scalar = core::Scalar::float32;
  int64_t batch = 0, seq = 0, embedding_dim = 0;
  Table token, type, position;
  double scale = 1.0;  // of token rows
  /// Position encodings that come ready instead of a position table, in the compute type.
  const void* encoding = nullptr;
  int64_t encoding_stride[2] = {0, 0};  // batch, seq; in elements
  Norm norm = Norm::none;
  const void* norm_weight = nullptr;  // [embedding_dim]; nullptr: ones
  const void* norm_bias = nullptr;    // [embedding_dim]; nullptr: zeros
  double eps = 1e-5;
  double dropout = 0.0;                // probability
  const int64_t* seed = nullptr;       // on the data's device; nullptr: no dropout
  core::DeviceError* error = nullptr;  // CUDA: where an index outside its table is recorded
};

struct ForwardArguments {
  Arguments input;
  void* out = nullptr;  // [batch, seq, embedding_dim], contiguous
  /// [batch, seq] in the compute type; nullptr where no backward pass will need them.
  void* mean = nullptr;
  void* rstd = nullptr;
};

/// Tokens are numbered place * batch + batch index, so that neighbours share a position; works on
/// tokens [begin, end). Indices must have been checked.
POSEMBED_CPU_KERNEL(forward, void(const ForwardArguments& arguments, int64_t begin, int64_t end));

/// All tokens on `stream`; the row of a token with an index outside its table is zeros.
const char* forward_cuda(const ForwardArguments& arguments, core::CudaStream stream);

/// The norm's parameters get their gradients from a fixed number of partial sums, whatever the
/// number of threads, so that the same bits come out each time.
inline constexpr int64_t parts_cpu = 32;
inline constexpr int64_t parts_cuda = 512;

struct BackwardArguments {
  Arguments input;
  const void* gradient = nullptr;  // [batch, seq, embedding_dim], contiguous
  const void* mean = nullptr;
  const void* rstd = nullptr;
  void* sum_gradient = nullptr;  // out [batch, seq, embedding_dim]: of the sum that the norm saw
  int64_t parts = 1;
  void* partial =
      nullptr;  // [parts, 2, embedding_dim] compute type; nullptr: norm gradients not wanted
  void* weight_gradient = nullptr;  // out [embedding_dim]
  void* bias_gradient = nullptr;    // out [embedding_dim]; nullptr: not wanted
};

/// Works on parts [begin, end) of the tokens.
POSEMBED_CPU_KERNEL(backward, void(const BackwardArguments& arguments, int64_t begin, int64_t end));

/// Adds up the parts of columns [begin, end).
POSEMBED_CPU_KERNEL(add_parts,
                    void(const BackwardArguments& arguments, int64_t begin, int64_t end));

/// Both steps on `stream`.
const char* backward_cuda(const BackwardArguments& arguments, core::CudaStream stream);

/// out = x with dropout; `x` and `out` may be the same. Its gradient is itself.
struct DropoutArguments {
  const void* x = nullptr;  // [count], contiguous
  void* out = nullptr;
  core::Scalar scalar = core::Scalar::float32;
  int64_t count = 0;
  double probability = 0.0;
  const int64_t* seed = nullptr;
};

POSEMBED_CPU_KERNEL(drop, void(const DropoutArguments& arguments, int64_t begin, int64_t end));

const char* drop_cuda(const DropoutArguments& arguments, core::CudaStream stream);

}  // namespace posembed::input
