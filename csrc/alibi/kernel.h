// The ALiBi kernels: the bias itself, the bias added to attention scores, the softmax of biased
// scores, and gradients.
// Press, Smith, Lewis, "Train Short, Test Long: Attention with Linear Biases", 2022.
#pragma once

#include <cstdint>

#include "core/cpu_kernel.h"
#include "core/cuda_launch.h"
#include "core/device_error.h"
#include "core/index.h"
#include "core/scalar.h"

namespace posembed::alibi {

/// One slope per head; with two sides, a second row has the slopes for keys after the query.
struct Slopes {
  const void* data = nullptr;  // [sides, heads] or [batch, sides, heads], contiguous
  core::Scalar scalar = core::Scalar::float32;
  int64_t heads = 0;
  int64_t sides = 1;
  int64_t sample_stride = 0;  // from one sample to the next; 0: all have the same
};

/// The positions of queries and keys, and which keys are hidden from a query. By default query row
/// r is at position offset + r and key column k at position k. Distances fit in 31 bits.
struct Distances {
  int64_t queries = 0;
  int64_t keys = 0;
  int64_t offset = 0;
  bool causal = true;      // keys after the query are hidden
  bool apply_mask = true;  // hidden keys get -infinity, otherwise bias 0

  core::IndexView query_positions;  // no data: none
  core::IndexView key_positions;
  int64_t query_stride = 0;  // from one batch to the next; 0: all have the same
  int64_t key_stride = 0;

  /// [documents + 1] boundaries among keys; keys of other documents are hidden. Query row r belongs
  /// to the document of key offset + r.
  core::IndexView cu_seqlens;
  int64_t documents = 0;

  const bool* mask = nullptr;  // [keys]; false: hidden
  int64_t mask_stride = 0;

  /// True if a row's biases depend only on key - query.
  bool plain() const {
    return query_positions.data == nullptr && key_positions.data == nullptr && documents == 0 &&
           mask == nullptr;
  }

  core::DeviceError* error = nullptr;  // CUDA: where distances of more than 31 bits are recorded
};

/// A matrix for each head: [batch, heads, queries, keys] with a contiguous last dimension.
struct Matrices {
  void* data = nullptr;
  int64_t stride[3] = {0, 0, 0};  // batch, head, query; in elements
};

/// out = bias
struct FillArguments {
  Slopes slopes;
  Distances distances;
  core::Scalar scalar = core::Scalar::float32;
  int64_t batch = 1;
  Matrices out;
};

/// out = in * scale + bias, or the softmax of that over keys. `in` and `out` are the same memory or
/// do not overlap.
struct ScoreArguments {
  Slopes slopes;
  Distances distances;
  core::Scalar scalar = core::Scalar::float32;
  int64_t batch = 0;
  double scale = 1.0;
  Matrices in;
  Matrices out;
};

/// The gradient of the slopes: the bias's gradient times distance, summed over keys into `partial`,
/// then over queries and batch.
struct SlopeGradient {
  int64_t sides = 1;  // 0: no gradient is requested
  int64_t heads = 0;
  double* partial = nullptr;  // [sides, batch, heads, queries]
  void* out = nullptr;        // [sides, heads] or [batch, sides, heads], contiguous
  core::Scalar scalar = core::Scalar::float32;
  bool by_sample = false;  // each sample has its own slopes
};

struct ReduceArguments {
  Distances distances;
  core::Scalar scalar = core::Scalar::float32;
  int64_t batch = 0;
  Matrices grad;
  SlopeGradient slopes;
};

/// Gradients through a softmax: of scores, scale * weights * (grad - sum of grad * weights), and of
/// slopes. Hidden keys have weight 0; NaN or infinities there do not count.
struct SoftmaxBackwardArguments {
  Distances distances;
  core::Scalar scalar = core::Scalar::float32;
  int64_t batch = 0;
  double scale = 1.0;
  Matrices grad;
  Matrices weights;
  Matrices out;
  SlopeGradient slopes;
};

/// Rows are numbered (batch * heads + head) * queries + query; each kernel processes rows [begin,
/// end).
POSEMBED_CPU_KERNEL(fill, void(const FillArguments& arguments, int64_t begin, int64_t end));
POSEMBED_CPU_KERNEL(add, void(const ScoreArguments& arguments, int64_t begin, int64_t end));
POSEMBED_CPU_KERNEL(softmax, void(const ScoreArguments& arguments, int64_t begin, int64_t end));
POSEMBED_CPU_KERNEL(softmax_backward,
                    void(const SoftmaxBackwardArguments& arguments, int64_t begin, int64_t end));

/// Fills slopes.partial. Sums run in a fixed order: the same bits for any split of the rows and, in
/// reduce, any instruction set.
POSEMBED_CPU_KERNEL(reduce, void(const ReduceArguments& arguments, int64_t begin, int64_t end));

/// Sums `partial` over all rows into `out`.
POSEMBED_CPU_KERNEL(reduce_heads,
                    void(const SlopeGradient& gradient, int64_t batch, int64_t queries));

/// All rows on `stream`. They return nullptr, or the text of a CUDA error.
const char* fill_cuda(const FillArguments& arguments, core::CudaStream stream);
const char* add_cuda(const ScoreArguments& arguments, core::CudaStream stream);
const char* softmax_cuda(const ScoreArguments& arguments, core::CudaStream stream);
const char* softmax_backward_cuda(const SoftmaxBackwardArguments& arguments,
                                  core::CudaStream stream);
const char* reduce_cuda(const ReduceArguments& arguments, core::CudaStream stream);

}  // namespace posembed::alibi
