// The rows of a table's gradient for a kernel that makes the gradient of one token after another:
// where an id stands once, that kernel writes the row of the result itself.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "token/sorted_ids.h"

namespace posembed::token {

/// On the CPU.
struct RowTargets {
  at::Tensor row_ids;          // of the touched rows, ascending
  at::Tensor rows;             // [row_ids, embedding_dim]: complete after sum_repeated()
  std::vector<void*> targets;  // where the row of each place goes; nullptr: nowhere
  at::Tensor repeated;         // the rows of ids that stand more than once
  SortedIds sums;              // entries: row of `rows` << 32 | row of `repeated`
};

/// Targets for a gradient of `table`, whose ids are contiguous; padding gets none. Uninitialised.
RowTargets row_targets(const at::Tensor& table, const at::Tensor& ids, int64_t padding_idx);

/// Call when all rows are written.
void sum_repeated(const RowTargets& of);

}  // namespace posembed::token
