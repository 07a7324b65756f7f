// Ids sorted by row, which the CPU uses to sum gradients of tables.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

#include "token/kernel.h"

namespace posembed::token {

/// See GroupArguments; owns the memory that its pointers refer to.
struct SortedIds {
  at::Tensor words, counts;
  uint64_t* entries = nullptr;
  int64_t* starts = nullptr;
  int64_t groups = 0;

  int64_t kept() const { return starts[groups]; }
  int64_t row(int64_t group) const { return static_cast<int64_t>(entries[starts[group]] >> 32); }
  /// The first group that begins at or after `entry`.
  int64_t group_at(int64_t entry) const {
    return std::lower_bound(starts, starts + groups + 1, entry) - starts;
  }
};

/// `ids`: contiguous; `first_row`: the row of id 0.
SortedIds sort_ids(const at::Tensor& ids, int64_t num_embeddings, int64_t padding_idx,
                   int64_t first_row = 0);

/// Sums all groups of `sorted`.
void sum_groups(const SumArguments& arguments, const SortedIds& sorted);

}  // namespace posembed::token
