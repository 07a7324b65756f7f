// The input kernels: token + type + position rows, LayerNorm or RMSNorm, and dropout, in one pass
// forward and one backward. Ba et al., "Layer Normalization", 2016; Zhang and Sennrich, "Root Mean
// Square Layer Normalization", 2019. The backward pass gathers the sum and draws dropout's mask
// again, so only mean and rstd are saved.
#pragma once

#include <cstdint>

#include "core/cuda_launch.h"
#include "core/index.h"
#include "core/instruction_set.h"
#include "core/scalar.h"
#include "sinusoidal/sinusoidal.h"

namespace posembed::input {

/// A table [rows, embedding_dim] with a row for each token; data == nullptr: no table.
struct Table {
  const void* data = nullptr;
  int64_t rows = 0;
  int64_t stride = 0;                // between rows, in elements
  core::IndexView index;             // the row; data == nullptr: offset + stride * seq index
  int64_t index_stride[2] = {0, 1};  // batch, seq, in elements; ids of tokens and types: contiguous
  int64_t offset = 0;
  int64_t first_row = 0;  // added to every index
  core::ErrorKind kind = core::ErrorKind::token_id;
};

/// A token's row, before first_row is added.
POSEMBED_INLINE int64_t row_index(const Table& table, int64_t batch, int64_t seq) {
  if (table.index.data == nullptr) return table.offset + seq * table.index_stride[1];
  return read(table.index, batch * table.index_stride[0] + seq * table.index_stride[1]);
}

enum class Norm : int8_t { none, layer, rms };

/// Arguments of both forward and backward.
struct Arguments {
  core::Scalar scalar = core::Scalar::float32;
  int64_t batch = 0, seq = 0, embedding_dim = 0;
  Table token, type, position;
  double scale = 1.0;  // of token rows
  /// Replaces the position table, at the positions in `position.index`; without pairs there is
  /// none. On CUDA only where computes_sinusoid_cuda().
  sinusoidal::Sinusoid sinusoid;
  /// CUDA otherwise, instead of `sinusoid`: its values, computed beforehand in the compute type.
  const void* encoding = nullptr;
  int64_t encoding_stride[2] = {0, 0};  // batch, seq; in elements
  Norm norm = Norm::none;
  const void* norm_weight = nullptr;  // [embedding_dim]; nullptr: ones
  const void* norm_bias = nullptr;    // [embedding_dim]; nullptr: zeros
  double eps = 1e-5;
  double dropout = 0.0;                // probability
  const int64_t* seed = nullptr;       // on the data's device; nullptr: no dropout
  int64_t first_element = 0;           // index of the output's first element in dropout's mask
  core::DeviceError* error = nullptr;  // CUDA: records an index outside its table
};

struct ForwardArguments {
  Arguments input;
  void* out = nullptr;  // [batch, seq, embedding_dim], contiguous
  /// [batch, seq] in the compute type; nullptr: not needed by a backward pass.
  void* mean = nullptr;
  void* rstd = nullptr;
};

/// Tokens are numbered seq index * batch + batch index, so that neighbours share a position;
/// processes tokens [begin, end). Indices must have been checked.
POSEMBED_CPU_KERNEL(forward, void(const ForwardArguments& arguments, int64_t begin, int64_t end));

/// Whether forward_cuda() takes the call, if `out` is aligned to 16 bytes: not rows that a block's
/// registers cannot hold, nor 2^31 tokens or rows of a table.
bool takes_cuda(const Arguments& arguments);

/// Whether forward_cuda() computes `sinusoid` itself. `out` must then be aligned to 16 bytes.
bool computes_sinusoid_cuda(const Arguments& arguments);

/// Processes all tokens on `stream`. A token with an index outside its table gets zeros.
const char* forward_cuda(const ForwardArguments& arguments, core::CudaStream stream);

/// Gradients that sum over tokens are reduced from a number of partial sums that does not depend on
/// threads, so that they have the same bits for any number of threads.
inline constexpr int64_t parts_cpu = 32;

/// Type tables with at most this many rows have a partial sum for each row.
inline constexpr int64_t max_types = 8;

/// The length of a partial sum: whole vectors.
POSEMBED_INLINE int64_t partial_columns(int64_t embedding_dim) {
  return (embedding_dim + 31) / 32 * 32;
}

struct BackwardArguments {
  Arguments input;
  const void* gradient = nullptr;  // [batch, seq, embedding_dim], contiguous
  const void* mean = nullptr;
  const void* rstd = nullptr;
  /// out [batch, seq, embedding_dim]: gradient of the norm's input; nullptr: it equals `gradient`.
  void* sum_gradient = nullptr;
  /// CPU, instead of `sum_gradient`: [batch, seq], the address of each token's row; nullptr: not
  /// written. Rows of whole vectors are aligned to vectors.
  void* const* sum_rows = nullptr;
  int64_t parts = 1;
  /// Scratch [parts, sums_of(), partial_columns()] in the compute type; nullptr: no sum is needed.
  void* partial = nullptr;
  void* weight_gradient = nullptr;    // out [embedding_dim], like those below; nullptr: not needed
  void* bias_gradient = nullptr;      // out [embedding_dim]
  void* type_gradient = nullptr;      // out [type.rows, embedding_dim]
  void* position_gradient = nullptr;  // out [seq, embedding_dim]: sums over the batch
};

/// The number of partial sums of a part: the norm's weight, its bias, then each type.
POSEMBED_INLINE int64_t sums_of(const BackwardArguments& b) {
  return 2 + (b.type_gradient == nullptr ? 0 : b.input.type.rows);
}

/// The destination of sum `number`; nullptr if it is not needed.
template <typename T>
POSEMBED_INLINE T* sum_target(const BackwardArguments& b, int64_t number) {
  if (number == 0) return static_cast<T*>(b.weight_gradient);
  if (number == 1) return static_cast<T*>(b.bias_gradient);
  return static_cast<T*>(b.type_gradient) + (number - 2) * b.input.embedding_dim;
}

/// Processes parts [begin, end) of the tokens, or of the seq indices if there is a
/// `position_gradient`.
POSEMBED_CPU_KERNEL(backward, void(const BackwardArguments& arguments, int64_t begin, int64_t end));

/// Adds up the parts of sums [begin, end).
POSEMBED_CPU_KERNEL(add_parts,
                    void(const BackwardArguments& arguments, int64_t begin, int64_t end));

/// The number of parts for backward_cuda(): blocks that run at once on the current device. Depends
/// on the model of the device, the sizes, and which gradients are needed; so do the bits of sums.
/// 0: backward_cuda() does not take the call: see takes_cuda(), or more types than fit.
int64_t parts_cuda(const BackwardArguments& arguments);

/// Both steps on `stream`, except `position_gradient`.
const char* backward_cuda(const BackwardArguments& arguments, core::CudaStream stream);

/// out = x with dropout; `x` and `out` may be the same. The gradient is the same operation.
struct DropoutArguments {
  const void* x = nullptr;  // [count], contiguous
  void* out = nullptr;
  core::Scalar scalar = core::Scalar::float32;
  int64_t count = 0;
  double probability = 0.0;
  const int64_t* seed = nullptr;
  int64_t first = 0;  // index of x[0] in the mask
};

POSEMBED_CPU_KERNEL(drop, void(const DropoutArguments& arguments, int64_t begin, int64_t end));

const char* drop_cuda(const DropoutArguments& arguments, core::CudaStream stream);

}  // namespace posembed::input
