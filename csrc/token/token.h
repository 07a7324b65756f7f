// The token table's kernels. Forward gathers rows. Backward sorts ids, so that one worker sums each
// touched row in a fixed order, in float32 (float64 for float64), and rounds once. A table may be a
// part of a vocabulary: ids of other parts give zeros.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "core/cuda_launch.h"
#include "core/fma.h"
#include "core/index.h"
#include "core/instruction_set.h"
#include "core/lane_sum.h"
#include "core/scalar.h"

namespace posembed::token {

/// The id of a row that another call writes.
inline constexpr int64_t hole = std::numeric_limits<int64_t>::min();

/// out[index] = scale * weight[ids[index] + first_row], or zeros if there is no such row. first_row
/// is positive for learned positions, negative for a part of a vocabulary.
struct GatherArguments {
  const void* weight = nullptr;  // [rows, embedding_dim], rows weight_stride apart
  void* out = nullptr;           // [count, embedding_dim], contiguous
  core::Scalar scalar = core::Scalar::float32;
  int64_t rows = 0;
  int64_t embedding_dim = 0;
  int64_t weight_stride = 0;
  core::IndexView ids;  // [count]
  int64_t count = 0;
  int64_t first_row = 0;
  double scale = 1.0;
  core::DeviceError* error = nullptr;  // CUDA: records ids outside; nullptr: not recorded
  core::ErrorKind kind = core::ErrorKind::token_id;
  bool has_holes = false;  // the rows of ids that are `hole` stay as they are
};

/// Gathers the rows of ids [begin, end).
POSEMBED_CPU_KERNEL(gather, void(const GatherArguments& arguments, int64_t begin, int64_t end));

/// Gathers all rows on `stream`.
const char* gather_cuda(const GatherArguments& arguments, core::CudaStream stream);

using core::span;

/// A row and an index share a 64-bit word, so neither may reach 2^32.
inline constexpr int64_t max_sorted = int64_t{1} << 32;

/// Sorts the indices of ids by row, then by index, so that a row's ids are adjacent. Omits padding
/// and ids outside the table.
struct GroupArguments {
  core::IndexView ids;  // [count]
  int64_t count = 0;
  int64_t num_embeddings = 0;
  int64_t first_row = 0;        // of id 0, as in GatherArguments
  int64_t padding_idx = -1;     // an id; -1: none
  uint64_t* entries = nullptr;  // out [count]: row << 32 | index, ascending
  uint64_t* scratch = nullptr;  // [count]
  int64_t* starts = nullptr;    // out [count + 1]: start of each group of one row, and the end
  int64_t* groups = nullptr;    // out: number of groups
};

POSEMBED_CPU_KERNEL(group, void(const GroupArguments& arguments));

/// The row of `gradient` that is summed for each id, and its factor.
struct Sources {
  const uint32_t* rows = nullptr;  // [count]; nullptr: rows 0, 1, …
  const void* factors = nullptr;   // [count], float64 for float64, otherwise float32; nullptr: ones
};

/// out[row of group] = scale * the sum of the group's rows of `gradient`, optionally divided by
/// their number.
struct SumArguments {
  const void* gradient = nullptr;  // [count, embedding_dim], contiguous
  Sources sources;                 // default: row `index` for ids[index]
  void* out = nullptr;  // dense: [num_embeddings, embedding_dim]; otherwise [groups, embedding_dim]
  bool dense = true;    // dense: a group's row is the table's; otherwise its number
  bool streaming = false;  // non-temporal stores: `out` is large and its pages are in use
  core::Scalar scalar = core::Scalar::float32;
  int64_t embedding_dim = 0;
  const uint64_t* entries = nullptr;
  const int64_t* starts = nullptr;
  double scale = 1.0;
  bool scale_grad_by_freq = false;
};

/// Sums groups [begin, end); does not change other rows.
POSEMBED_CPU_KERNEL(sum_groups, void(const SumArguments& arguments, int64_t begin, int64_t end));

/// Writes a whole dense table of `rows` rows; rows without a group become zeros. The work has
/// `rows` + starts[groups] steps, one for each row and one for each entry; processes steps [begin,
/// end).
struct FillArguments {
  SumArguments sum;
  int64_t rows = 0;
  int64_t groups = 0;
};

POSEMBED_CPU_KERNEL(fill_table, void(const FillArguments& arguments, int64_t begin, int64_t end));

/// The backward pass on a CUDA device: groups ids, sums rows, without a host synchronisation.
struct BackwardArguments {
  const void* gradient = nullptr;  // [count, embedding_dim], contiguous
  Sources sources;                 // as in SumArguments
  // [num_embeddings, embedding_dim], all written; rows form: a row for each id that may be there,
  // of which the first `groups` are written
  void* out = nullptr;
  core::Scalar scalar = core::Scalar::float32;
  int64_t embedding_dim = 0;
  core::IndexView ids;  // [count]; ids outside the table are omitted
  int64_t count = 0;
  int64_t num_embeddings = 0;
  int64_t first_row = 0;
  int64_t padding_idx = -1;
  double scale = 1.0;
  bool scale_grad_by_freq = false;
  int64_t* row_ids = nullptr;   // rows form: out [count], row of each of `out`; nullptr: dense
  int64_t* groups = nullptr;    // rows form: out, number of rows
  void* workspace = nullptr;    // workspace_bytes of them, 256-byte aligned
  int64_t workspace_bytes = 0;  // backward_workspace_cuda of the other arguments
};

int64_t backward_workspace_cuda(const BackwardArguments& arguments);

/// Writes `out`, and in the rows form row_ids and groups; nothing if there are no ids or rows.
const char* backward_cuda(const BackwardArguments& arguments, core::CudaStream stream);

// -------------------------------------------------------------------------------- quantized kernel
// Rows of codes: gathered, widened and scaled in one pass, in float32 (float64 for float64), and
// rounded once. A code is a number of 8 or 4 bits, and a block of a row shares a scale.

enum class Code : int8_t {
  float8,  // e4m3fn
  int8,
  uint4,  // two in a byte, the first in its lower half
};

/// out[index] = factor * (code * scale + bias) of row ids[index].
struct QuantizedArguments {
  const uint8_t* codes = nullptr;  // [rows, embedding_dim], rows row_bytes apart
  Code code = Code::float8;
  // [rows / block_rows, embedding_dim / block_columns], rounded up: float32, or bytes that are
  // powers of two (ue8m0)
  const void* scales = nullptr;
  const float* biases = nullptr;  // as scales; nullptr: 0
  bool has_exponents = false;     // scales are bytes
  void* out = nullptr;            // [count, embedding_dim], contiguous
  core::Scalar scalar = core::Scalar::float32;
  int64_t rows = 0, embedding_dim = 0, row_bytes = 0;
  int64_t block_rows = 1, block_columns = 1;
  core::IndexView ids;  // [count]
  int64_t count = 0;
  double factor = 1.0;
  core::DeviceError* error = nullptr;  // CUDA: where an id outside is recorded
};

/// Gathers rows of ids [begin, end), which must have been checked.
POSEMBED_CPU_KERNEL(gather_codes,
                    void(const QuantizedArguments& arguments, int64_t begin, int64_t end));

/// Gathers all rows on `stream`; zeros for an id outside.
const char* gather_codes_cuda(const QuantizedArguments& arguments, core::CudaStream stream);

/// The number of one code. Float8: see core/scalar.h.
template <Code code>
POSEMBED_INLINE float number_of(uint32_t bits) {
  if constexpr (code == Code::int8) return static_cast<float>(static_cast<int8_t>(bits));
  if constexpr (code == Code::uint4) return static_cast<float>(bits);
  const uint32_t magnitude = bits & 0x7fu;
  const float normal = core::float_from_bits((magnitude << 20) + (120u << 23));
  const float small = static_cast<float>(magnitude) * 0x1p-9f;  // no denormal, which may be flushed
  const float value = magnitude < 8 ? small : magnitude == 0x7fu ? NAN : normal;
  return core::float_from_bits(core::float_bits(value) | (bits & 0x80u) << 24);
}

template <Code code>
POSEMBED_INLINE uint32_t code_at(const uint8_t* row, int64_t column) {
  if constexpr (code != Code::uint4) return row[column];
  return row[column / 2] >> 4 * (column & 1) & 15u;
}

/// Scale and bias of a block of columns.
struct BlockScale {
  float scale, bias;
};

/// The blocks of a row.
POSEMBED_INLINE int64_t blocks_of(const QuantizedArguments& a) {
  return (a.embedding_dim + a.block_columns - 1) / a.block_columns;
}

/// Those of block `at` of the table.
POSEMBED_INLINE BlockScale block_scale(const QuantizedArguments& a, int64_t at) {
  const float bias = a.biases == nullptr ? -0.0f : a.biases[at];  // adding -0 changes no bit
  if (!a.has_exponents) return {static_cast<const float*>(a.scales)[at], bias};
  const uint32_t exponent = static_cast<const uint8_t*>(a.scales)[at];
  if (exponent == 0xffu) return {NAN, bias};
  return {core::float_from_bits(exponent == 0 ? 0x00400000u : exponent << 23), bias};
}

/// The element of T for a code, before its rounding.
template <typename C, bool has_bias>
POSEMBED_INLINE C dequantized(float number, BlockScale block, C factor) {
  const C value =
      has_bias ? core::fma(C{number}, C{block.scale}, C{block.bias}) : C{number} * C{block.scale};
  return value * factor;
}

}  // namespace posembed::token
