// What gradients of tables need: ids sorted by row, the rows that they touch, and a node with rows.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "dispatcher/autograd.h"
#include "token/token.h"

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

// ------------------------------------------------------------------------------------- row targets
// Destinations for a kernel that computes the gradient of each token: rows of ids that occur once
// are written directly to the table's gradient.

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

// --------------------------------------------------------------------------------------- rows node
// A table's gradient in the rows form has no derivative: second derivatives need gradient="dense".

inline constexpr const char* no_second_derivative =
    "posembed: gradient='rows' has no second derivative; use gradient='dense'";

inline dispatcher::variable_list refuse_rows(const dispatcher::Gradients&) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, no_second_derivative);
}

/// Calls `function`, which calls `op`, and gives the rows that it returns beside their ids a node
/// that throws when it runs.
template <auto& op, typename Function, typename... Inputs>
std::tuple<at::Tensor, at::Tensor> underived_rows(const Function& function,
                                                  const Inputs&... inputs) {
  TORCH_CHECK_NOT_IMPLEMENTED(!(dispatcher::tangent(inputs).defined() || ...),
                              no_second_derivative);
  auto node = dispatcher::node_for<dispatcher::FunctionNode<op, refuse_rows>>(inputs...);
  std::tuple<at::Tensor, at::Tensor> outputs = dispatcher::below_autograd(function);
  if (node) torch::autograd::set_history(std::get<1>(outputs), node);
  return outputs;
}

}  // namespace posembed::token
