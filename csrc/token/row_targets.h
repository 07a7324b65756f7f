// The rows of a table's gradient for a kernel that computes the gradient of each token: it writes
// the rows of ids that occur once directly to the result.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "token/sorted_ids.h"

namespace posembed::token {

/// On the CPU.
struct RowTargets {
  at::Tensor row_ids;          // of the touched rows, ascending
  at::Tensor rows;             // [row_ids, embedding_dim]: complete after sum_repeated()
  std::vector<void*> targets;  // the address for each token's row; nullptr: not wanted
  at::Tensor repeated;         // rows of tokens whose ids occur more than once
  SortedIds sums;              // entries: row of `rows` << 32 | row of `repeated`
};

/// Targets for a gradient of `table`; ids are contiguous, padding has no target. Uninitialised.
RowTargets row_targets(const at::Tensor& table, const at::Tensor& ids, int64_t padding_idx);

/// Adds the rows of repeated ids. Call when all targets are written.
void sum_repeated(const RowTargets& of);

}  // namespace posembed::token
