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
#include "sinusoidal/sinusoid.h"

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

/// What a CUDA launch carries of a sinusoid's turns in its arguments.
inline constexpr int64_t turn_bytes_cuda = 16384;

/// Pairs that one launch can carry.
inline int64_t most_pairs_cuda(core::Scalar scalar) {
  const bool wide = scalar == core::Scalar::float64;
  return turn_bytes_cuda /
         static_cast<int64_t>(wide ? sizeof(core::Turn128) : sizeof(core::Turn64));
}

enum class Norm : int8_t { none, layer, rms };

/// What forward and backward have in common.
struct Arguments {
  core::Scalar scalar = core::Scalar::float32;
  int64_t batch = 0, seq = 0, embedding_dim = 0;
  Table token, type, position;
  double scale = 1.0;  // of token rows
  /// Instead of a position table, at the positions that `position` tells; no pairs: there is none.
  sinusoidal::Sinusoid sinusoid;
  /// CUDA, where a row has more pairs than a launch can carry: the sinusoids ready in the compute
  /// type.
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

/// Gradients that sum over tokens come from a fixed number of partial sums, whatever the number of
/// threads, so that the same bits come out each time.
inline constexpr int64_t parts_cpu = 32;
inline constexpr int64_t parts_cuda = 1024;

/// Tables of no more types than this have a partial sum for each type.
inline constexpr int64_t most_types = 8;

/// Partial sums are rows of whole vectors.
POSEMBED_INLINE int64_t partial_columns(int64_t embedding_dim) {
  return (embedding_dim + 31) / 32 * 32;
}

struct BackwardArguments {
  Arguments input;
  const void* gradient = nullptr;  // [batch, seq, embedding_dim], contiguous
  const void* mean = nullptr;
  const void* rstd = nullptr;
  /// out [batch, seq, embedding_dim]: of the sum that the norm saw; nullptr: it is `gradient`.
  void* sum_gradient = nullptr;
  /// CPU, instead of `sum_gradient`: [batch, seq], where each token's row of it goes; nullptr:
  /// nowhere. Rows of whole vectors are aligned to them.
  void* const* sum_rows = nullptr;
  int64_t parts = 1;
  /// [parts, sums_of(), partial_columns()] in the compute type; nullptr: none is wanted.
  void* partial = nullptr;
  void* weight_gradient = nullptr;    // out [embedding_dim], like those below; nullptr: not wanted
  void* bias_gradient = nullptr;      // out [embedding_dim]
  void* type_gradient = nullptr;      // out [type.rows, embedding_dim]
  void* position_gradient = nullptr;  // out [seq, embedding_dim]: sums over the batch
};

/// Rows of a part: for the norm's weight and bias, then for each type.
POSEMBED_INLINE int64_t sums_of(const BackwardArguments& b) {
  return 2 + (b.type_gradient == nullptr ? 0 : b.input.type.rows);
}

/// Works on parts [begin, end) of the tokens, or of the places where `position_gradient` is wanted.
POSEMBED_CPU_KERNEL(backward, void(const BackwardArguments& arguments, int64_t begin, int64_t end));

/// Adds up the parts of sums [begin, end).
POSEMBED_CPU_KERNEL(add_parts,
                    void(const BackwardArguments& arguments, int64_t begin, int64_t end));

/// Both steps on `stream`, but for `position_gradient`.
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
