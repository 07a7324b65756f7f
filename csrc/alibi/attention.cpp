// Attention with ALiBi's bias: scores in memory, and one kernel for scale, bias, mask and softmax.
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/matmul.h>
#include <torch/library.h>

#include <cmath>

#include "alibi/operator.h"
#include "dispatcher/checks.h"

namespace posembed::alibi {
namespace {

/// Autocast casts the operands of matrix products, so that their dtypes may differ.
void check_dtype_of_query(const Tensor& tensor, const char* argument, const Tensor& query) {
  const auto device = query.device().type();
  if (at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device)) {
    return;
  }
  dispatcher::check_same_dtype(tensor, argument, query, "query");
}

/// Matrix products would broadcast some of these shapes, and reject others without naming the
/// argument.
void check_attention(const Tensor& query, const Tensor& key, const Tensor& value, double dropout) {
  dispatcher::check_rank(query, "query", 4, "[batch, num_heads, seq, head_dim]");
  dispatcher::check_rank(key, "key", 4, "[batch, heads, keys, head_dim]");
  dispatcher::check_rank(value, "value", 4, "[batch, heads, keys, value_dim]");
  check_dtype_of_query(key, "key", query);
  check_dtype_of_query(value, "value", query);
  dispatcher::check_size(key.sym_size(0), query.sym_size(0), "key", "batch");
  dispatcher::check_size(key.sym_size(3), query.sym_size(3), "key", "head_dim");
  dispatcher::check_size(value.sym_size(0), query.sym_size(0), "value", "batch");
  dispatcher::check_size(value.sym_size(1), key.sym_size(1), "value", "heads");
  dispatcher::check_size(value.sym_size(2), key.sym_size(2), "value", "keys");
  TORCH_CHECK_VALUE(key.sym_size(1) > 0 && query.sym_size(1) % key.sym_size(1) == 0,
                    "key: expected heads that divide those of query, ", query.sym_size(1), ", got ",
                    key.sym_size(1));
  TORCH_CHECK_VALUE(dropout >= 0 && dropout <= 1, "dropout: expected 0 to 1, got ", dropout);
}

double scale_for(const Tensor& query) {
  return 1.0 / std::sqrt(static_cast<double>(query.sym_size(3).guard_int(__FILE__, __LINE__)));
}

/// The softmax, in place if no gradient can be needed. Does not ask scores whether they require
/// grad, because inside a torch.func transform they do not tell.
Tensor weights_of(Tensor scores, const Tensor& slopes, double scale, const Call& call) {
  if (at::GradMode::is_enabled()) return alibi_softmax(scores, slopes, scale, call);
  alibi_softmax_(scores, slopes, scale, call);
  return scores;
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& slopes,
                 std::optional<double> scale, double dropout, const Call& call) {
  check_attention(query, key, value, dropout);
  const c10::SymInt batch = query.sym_size(0), heads = query.sym_size(1),
                    queries = query.sym_size(2), key_heads = key.sym_size(1),
                    keys = key.sym_size(2);
  // The queries of a group of heads are rows of one matrix, so keys need not be copied for each
  // head.
  const c10::SymInt rows = heads / key_heads * queries;
  const Tensor grouped = query.reshape_symint({batch, key_heads, rows, query.sym_size(3)});
  const Tensor scores =
      at::matmul(grouped, key.transpose(-2, -1)).view_symint({batch, heads, queries, keys});
  Tensor weights = weights_of(scores, slopes, scale.has_value() ? *scale : scale_for(query), call);
  if (dropout > 0) weights = at::dropout(weights, dropout, /*train=*/true);
  return at::matmul(weights.view_symint({batch, key_heads, rows, keys}), value)
      .view_symint({batch, heads, queries, value.sym_size(3)});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  alibi_attention.compose_batched<attention>(m);
  alibi_check_attention.compose_batched<check_attention>(m);
}

}  // namespace posembed::alibi
