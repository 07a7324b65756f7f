// Products of queries and a table's rows, gathered to scores, and the transpose: scores summed into
// rows. torch computes the products, for a block of queries at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "core/cuda_launch.h"
#include "core/instruction_set.h"
#include "core/scalar.h"

namespace posembed::relative_logits {

/// A row that stands for logit 0, and one for -infinity, which hides the key.
inline constexpr int32_t no_row = -1, hidden_row = -2;

/// Consecutive keys of a query whose rows are equal (step 0) or follow one another (1 or -1), or
/// `any_step`.
struct Run {
  int32_t keys, row, step;
};

inline constexpr int32_t any_step = 2;

/// The runs of a query's rows on one axis, and the first and last row; low > high if there is none.
struct QueryRows {
  std::vector<Run> runs;
  int32_t low, high;
};

/// A block of scores, and the products of its places: its queries, or its keys if `by_key`. CPU
/// kernels take one sample and head.
struct Block {
  const int32_t* rows = nullptr;     // [axes, batch, queries, keys], keys contiguous
  int64_t row_stride[3] = {0};       // axes, batch, queries; in elements, as other strides
  const QueryRows* lines = nullptr;  // CPU: [axes, batch, queries], as rows; null if `by_key`
  const void* scores = nullptr;      // [batch, heads, queries, keys], keys contiguous
  int64_t score_stride[3] = {0};     // batch, heads, queries
  void* out = nullptr;               // like scores
  int64_t out_stride[3] = {0};       // batch, heads, queries
  void* products = nullptr;          // [batch, heads, places, row_count], in the compute type
  int64_t first_row = 0;             // the row of the first product
  int64_t row_count = 0;             // at least 1
  core::Scalar scalar = core::Scalar::float32;  // of scores and out
  int64_t axes = 1, batch = 1, heads = 1, queries = 0, keys = 0;
  double scale = 1;
  bool by_key = false;
  core::DeviceError* error = nullptr;  // CUDA: where a row outside the table is recorded
};

/// Writes the runs of `keys` rows, at most as many, and sets the other members of `line`: code for
/// an instruction set shares no function with other code, so it cannot let a vector grow.
POSEMBED_CPU_KERNEL(find_runs, void(const int32_t* rows, int64_t keys, Run* runs, int64_t& count,
                                    QueryRows& line));

/// Sets first_row and row_count to the rows that the block uses, or to one row if it uses none.
POSEMBED_CPU_KERNEL(narrow_rows, void(Block& block));

/// out = scores + the sum over axes of scale * the product of a row; scores may be null, and those
/// of hidden keys are not used. Rows must be -2 or more, and those of the block have products.
/// Products have the compute type.
POSEMBED_CPU_KERNEL(gather, void(const Block& block));

/// Adds scale * scores to products, in an order that the rows give.
POSEMBED_CPU_KERNEL(scatter, void(const Block& block));

/// On `stream`. Products have the type of scores. A row outside the table is recorded, and its
/// logit is 0.
const char* gather_cuda(const Block& block, core::CudaStream stream);

/// On `stream`. Products have the compute type. Sums 32 keys at a time, in a fixed order.
const char* scatter_cuda(const Block& block, core::CudaStream stream);

}  // namespace posembed::relative_logits
