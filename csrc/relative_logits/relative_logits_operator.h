// C++ calls of the operators of relative logits, through the dispatcher as in Python.
#pragma once

#include <optional>
#include <tuple>

#include "alibi/alibi_operator.h"
#include "dispatcher/operator.h"
#include "relative_bias/relative_bias_operator.h"

namespace posembed::relative_logits {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

/// A query and a table, or with `by_key` keys and a table, and the row of each query and key.
struct Factors {
  Tensor query, table, rows;
  double scale = 1;
  bool by_key = false;

  POSEMBED_FIELDS(self.query, self.table, self.rows, self.scale, self.by_key)
};

/// The last argument: scores to which the logits are added.
inline const dispatcher::Operator<Tensor(), Factors, const MaybeTensor&> relative_logits{
    "relative_logits"};

/// The first argument: scores.
inline const dispatcher::Operator<void(const Tensor&), Factors> relative_logits_{
    "relative_logits_"};

/// gradient, factors, whether the gradients of query and table are needed: a result that is not is
/// empty.
inline const dispatcher::Operator<std::tuple<Tensor, Tensor>(const Tensor&), Factors, bool, bool>
    relative_logits_backward{"relative_logits_backward"};

/// How pairs of queries and keys map to rows: buckets of their distances, and the positions and
/// documents of a call.
struct Pairs {
  relative_bias::Bucketing bucketing;
  alibi::Call call;

  POSEMBED_FIELDS(self.bucketing.max_distance, self.bucketing.bidirectional, self.bucketing.kind,
                  self.call.causal(), self.call.query_offset(), self.call.attention_mask(),
                  self.call.positions_from_mask(), self.call.query_positions(),
                  self.call.key_positions(), self.call.cu_seqlens(), self.call.apply_mask(),
                  self.call.query_offsets())
};

/// The row of each pair, int64: a tensor on the device of the result, query length, key length, the
/// buckets of each axis.
inline const dispatcher::Operator<Tensor(const Tensor&, c10::SymInt, c10::SymInt, at::IntArrayRef),
                                  Pairs>
    relative_rows{"relative_rows"};

}  // namespace posembed::relative_logits
