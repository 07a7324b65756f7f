// The ALiBi kernels: the bias itself, the bias added to attention scores, the softmax of biased
// scores, and gradients.
// Press, Smith, Lewis, "Train Short, Test Long: Attention with Linear Biases", 2022.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/cuda_launch.h"
#include "core/fma.h"
#include "core/index.h"
#include "core/instruction_set.h"
#include "core/macros.h"
#include "core/scalar.h"
#if defined(POSEMBED_ISA)
#include "core/vector.h"
#endif

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

  core::DeviceError* error = nullptr;  // CUDA: where distances of more than 31 bits are recorded
};

/// True if a row's biases depend only on key - query.
POSEMBED_INLINE bool is_plain(const Distances& distances) {
  return distances.query_positions.data == nullptr && distances.key_positions.data == nullptr &&
         distances.documents == 0 && distances.mask == nullptr;
}

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

// -------------------------------------------------------------------------------------------- bias
// The ALiBi formula, shared by CPU and CUDA: bias = -slope * |query position - key position|, and
// the rules that hide keys from a query.

/// A row of a matrix of scores: one query of one head.
struct Row {
  int64_t batch;
  int64_t head;
  int64_t query;
};

POSEMBED_INLINE Row row_at(int64_t number, int64_t heads, int64_t queries) {
  const int64_t plane = number / queries;
  return {plane / heads, plane % heads, number % queries};
}

template <typename T>
POSEMBED_INLINE T* row_data(const Matrices& matrices, const Row& row) {
  return static_cast<T*>(matrices.data) + row.batch * matrices.stride[0] +
         row.head * matrices.stride[1] + row.query * matrices.stride[2];
}

/// The distance that marks a key as hidden from the query.
inline constexpr int32_t hidden = std::numeric_limits<int32_t>::min();

/// The bias of one head as a function of distance = key position - query position: two half-lines
/// that meet at distance 0. Hidden keys get -infinity, or 0 to keep their scores.
template <typename C>
struct BiasLine {
  C before;
  C after;
  C hidden;
};

template <typename C>
POSEMBED_INLINE BiasLine<C> bias_line(const Slopes& slopes, const Distances& distances,
                                      int64_t batch, int64_t head) {
  const auto read = [&](int64_t index) {
    return core::read_floating<C>(slopes.data, slopes.scalar, batch * slopes.sample_stride + index);
  };
  return {read(head), -read(head + (slopes.sides - 1) * slopes.heads),
          distances.apply_mask ? -static_cast<C>(INFINITY) : C(0)};
}

template <typename C>
POSEMBED_INLINE C slope_at(const BiasLine<C>& line, int32_t distance) {
  return distance > 0 ? line.after : line.before;
}

/// Computed from the distance, so that it is exact at any position. Some models use slope * key
/// position, which loses precision at large positions.
template <typename C>
POSEMBED_INLINE C bias(const BiasLine<C>& line, int32_t distance) {
  return distance == hidden ? line.hidden : slope_at(line, distance) * static_cast<C>(distance);
}

/// A score with its bias. Hidden scores are not used: padding may hold NaN.
template <typename C>
POSEMBED_INLINE C biased(const BiasLine<C>& line, int32_t distance, C score, C scale) {
  const C scaled = score * scale;
  if (distance == hidden) return line.hidden < 0 ? line.hidden : scaled;
  return core::fma(slope_at(line, distance), static_cast<C>(distance), scaled);
}

/// The distance, or `hidden`, if only the order of positions decides what is visible.
POSEMBED_INLINE int32_t causal_distance(const Distances& distances, int32_t distance) {
  return distances.causal && distance > 0 ? hidden : distance;
}

/// Keys [begin, end).
struct KeyRange {
  int64_t begin;
  int64_t end;
};

/// The keys of the document that contains the query of row `row`; empty if no document does.
POSEMBED_INLINE KeyRange document_of(const Distances& distances, int64_t row) {
  if (distances.documents == 0) return {0, distances.keys};
  const int64_t key = distances.offset + row;       // of the query's token
  int64_t low = 0, high = distances.documents + 1;  // boundaries [0, low) are at or before `key`
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (core::read(distances.cu_seqlens, middle) <= key) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == 0 || low > distances.documents) return {0, 0};
  return {core::read(distances.cu_seqlens, low - 1), core::read(distances.cu_seqlens, low)};
}

POSEMBED_INLINE int64_t query_position(const Distances& distances, int64_t batch, int64_t row) {
  if (distances.query_positions.data == nullptr) return distances.offset + row;
  return core::read(distances.query_positions, batch * distances.query_stride + row);
}

POSEMBED_INLINE int64_t key_position(const Distances& distances, int64_t batch, int64_t key) {
  if (distances.key_positions.data == nullptr) return key;
  return core::read(distances.key_positions, batch * distances.key_stride + key);
}

POSEMBED_INLINE bool is_masked(const Distances& distances, int64_t batch, int64_t key) {
  return distances.mask != nullptr && !distances.mask[batch * distances.mask_stride + key];
}

/// Writes the gradient of one head's slopes, of one sample if each has its own, from the sums of
/// distance * grad on either side.
POSEMBED_INLINE void store_slope_gradient(double before, double after,
                                          const SlopeGradient& gradient, int64_t sample,
                                          int64_t head) {
  const int64_t first = sample * gradient.sides * gradient.heads + head;
  const auto write = [&](double value, int64_t index) {
    switch (gradient.scalar) {
      case core::Scalar::float64:
        return core::store(value, static_cast<double*>(gradient.out) + index);
      case core::Scalar::bfloat16:
        return core::store(static_cast<float>(value),
                           static_cast<core::BFloat16*>(gradient.out) + index);
      case core::Scalar::float16:
        return core::store(static_cast<float>(value),
                           static_cast<core::Float16*>(gradient.out) + index);
      default:
        return core::store(static_cast<float>(value), static_cast<float*>(gradient.out) + index);
    }
  };
  write(gradient.sides == 1 ? before + after : before, first);
  if (gradient.sides == 2) write(after, first + gradient.heads);
}

// ------------------------------------------------------------------------------------------ slopes
// The slopes of ALiBi: a geometric series over the heads. Press, Smith, Lewis, "Train Short, Test
// Long: Attention with Linear Biases", 2022, section 3.

/// Far more heads than any model has. Slopes are computed one by one.
inline constexpr int64_t max_heads = 65536;

enum class SlopeKind : int8_t {
  /// The paper's series: powers of 2^(-max_bias / n) for n = 2^k heads. Other head counts take the
  /// series of the next lower power of two, then every second slope of the next higher one.
  paper,
  /// Powers of 2^(-max_bias / heads) for every head count.
  geometric,
};

/// The slope of head `head` (0 … heads - 1) of a model with `heads` heads, correctly rounded.
[[maybe_unused]] static float slope(SlopeKind kind, double max_bias, int64_t heads, int64_t head) {
  int64_t power = 1;
  while (power <= heads / 2) power *= 2;
  const int64_t whole = kind == SlopeKind::paper ? power : heads;
  const bool extra = head >= whole;  // every second slope of the next series
  const double count = static_cast<double>(extra ? 2 * whole : whole);
  const double share = static_cast<double>(extra ? 2 * (head - whole) + 1 : head + 1) / count;
  return static_cast<float>(std::exp2(-max_bias * share));
}

// --------------------------------------------------------------------------------------------- exp
// For softmax, in float32 with an error below 2 ulp. CPU vectors, scalars and CUDA share one
// formula and give the same bits.

/// e^x for x <= 0; 0 below -87.3, where results would be denormal. NaN stays NaN. `V` is float or a
/// vector of floats that has an fma; `W` is as wide, of uint32_t.
template <typename V, typename W>
POSEMBED_INLINE V exp_of_negative(V x) {
  const auto all = [](float value) { return V{} + value; };
  // x = n ln 2 + r: adding 1.5 * 2^23 rounds to the integer n and leaves it in the lowest bits.
  const V shifted = core::fma(x, all(1.44269504f), all(0x1.8p23f));
  const V n = shifted - all(0x1.8p23f);
  const V r =
      core::fma(n, all(1.90465421e-9f), core::fma(n, all(-0.693147182f), x));  // ln 2 in two parts
  // The series up to r^7: with |r| <= 0.35 the next term is below 6e-9.
  V sum = all(1.0f / 5040);
  const float terms[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  for (const float term : terms) sum = core::fma(sum, r, all(term));
  W bits;
  memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + (W{} + 0x3f800000u);
  V power;
  memcpy(&power, &bits, sizeof power);
  return x < all(-87.3f) ? V{} : sum * power;
}

POSEMBED_INLINE float exp_of_negative(float x) { return exp_of_negative<float, uint32_t>(x); }

}  // namespace posembed::alibi
