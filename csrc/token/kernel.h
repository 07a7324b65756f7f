// The token table's kernels. Forward gathers rows. Backward sorts ids, so that one worker sums each
// touched row in a fixed order, in float32 (float64 for float64), and rounds once. A table may be a
// part of a vocabulary: ids of other parts give zeros.
#pragma once

#include <cstdint>
#include <limits>

#include "core/cpu_kernel.h"
#include "core/cuda_launch.h"
#include "core/device_error.h"
#include "core/index.h"
#include "core/scalar.h"
#include "core/span.h"

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

/// The backward pass on a CUDA device: sort, then sums, without a host synchronisation.
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

}  // namespace posembed::token
