// Destinations for a kernel that computes the gradient of each token: rows of ids that occur once
// are written directly to the table's gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "token/sorted_ids.h"

namespace posembed::token {

/// The destinations, on the CPU.
struct RowTargets {
  at::Tensor row_ids;          // of the touched rows, ascending
  at::Tensor rows;             // [row_ids, embedding_dim]: complete after sum_repeated()
  std::vector<void*> targets;  // the address of each token's row; nullptr: not written
  at::Tensor repeated;         // rows of tokens whose ids occur more than once
  SortedIds sums;              // entries: row of `rows` << 32 | row of `repeated`
};

/// Uninitialised targets for a gradient of `table`; ids are contiguous, and padding has no target.
RowTargets row_targets(const at::Tensor& table, const at::Tensor& ids, int64_t padding_idx);

/// Adds the rows of repeated ids. Call it after all targets are written.
void sum_repeated(const RowTargets& destinations);

}  // namespace posembed::token
