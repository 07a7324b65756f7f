// Derivatives of the token operators. Look-up and summing of rows are each other's transpose, so
// each is the other's gradient, and only ids are saved.
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/clamp_min.h>
#include <ATen/ops/div.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/masked_fill.h>
#include <ATen/ops/ones.h>
#include <torch/library.h>

#include "dispatcher/autograd.h"
#include "dispatcher/tangent.h"
#include "dispatcher/tensors.h"
#include "token/operator.h"
#include "token/rows_node.h"

namespace posembed::token {
namespace {

class EmbeddingBackward : public dispatcher::OperatorNode<EmbeddingBackward> {
 public:
  static constexpr const char* label = "EmbeddingBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    visit(ids);
    visit(num_embeddings);
    visit(padding_idx);
    visit(scale);
    visit(scale_grad_by_freq);
    visit(form);
    visit(vocabulary_start);
  }

  dispatcher::variable_list backward(dispatcher::variable_list&& gradients) {
    if (!gradients[0].defined()) return {Tensor()};
    return {table_gradient(gradients[0], *dispatcher::unpack(ids), num_embeddings, padding_idx,
                           scale, scale_grad_by_freq, form, vocabulary_start)};
  }

  dispatcher::SavedVariable ids;
  c10::SymInt num_embeddings;
  int64_t padding_idx = -1;
  double scale = 1.0;
  bool scale_grad_by_freq = false;
  std::string form;
  int64_t vocabulary_start = -1;
};

Tensor embedding_autograd(const Tensor& weight, const Tensor& ids, int64_t padding_idx,
                          double scale, bool scale_grad_by_freq, Text gradient,
                          int64_t vocabulary_start) {
  auto node = dispatcher::node_for<EmbeddingBackward>(weight);
  if (node) {
    node->ids = dispatcher::save(ids);
    node->num_embeddings = weight.sym_size(0);
    node->padding_idx = padding_idx;
    node->scale = scale;
    node->scale_grad_by_freq = scale_grad_by_freq;
    node->form = gradient;
    node->vocabulary_start = vocabulary_start;
  }
  return dispatcher::linear(node, weight, [&](const Tensor& table) {
    return call_embedding(table, ids, padding_idx, scale, scale_grad_by_freq, gradient,
                          vocabulary_start);
  });
}

/// The count of each id among `ids`: [..., 1], in a dtype that can hold it. 1 for ids outside the
/// table, whose rows are zeros.
Tensor counts(const Tensor& ids, const c10::SymInt& num_embeddings, const Tensor& like,
              int64_t vocabulary_start) {
  c10::SymDimVector sizes(ids.sym_sizes().begin(), ids.sym_sizes().end());
  sizes.push_back(1);
  const Tensor ones = at::ones_symint(sizes, like.options().dtype(dispatcher::compute_type(like)));
  const Tensor table =
      call_embedding_backward(ones, ids, num_embeddings, -1, 1.0, false, vocabulary_start);
  return call_embedding(table, ids, -1, 1.0, false, "dense", vocabulary_start).clamp_min(1);
}

/// The gradient of embedding_backward: a look-up of the rows that it summed into.
class EmbeddingBackwardBackward : public dispatcher::OperatorNode<EmbeddingBackwardBackward> {
 public:
  static constexpr const char* label = "EmbeddingBackwardBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    visit(ids);
    visit(padding_idx);
    visit(scale);
    visit(scale_grad_by_freq);
    visit(vocabulary_start);
  }

  dispatcher::variable_list backward(dispatcher::variable_list&& gradients) {
    const Tensor& table = gradients[0];
    if (!table.defined()) return {Tensor()};
    const Tensor places = *dispatcher::unpack(ids);
    Tensor rows = call_embedding(table, places, -1, scale, false, "dense", vocabulary_start);
    if (padding_idx >= 0) rows = rows.masked_fill(places.eq(padding_idx).unsqueeze(-1), 0);
    if (scale_grad_by_freq) {
      const Tensor times = counts(places, table.sym_size(0), table, vocabulary_start);
      rows = at::div(rows, times).to(table.scalar_type());
    }
    return {rows};
  }

  dispatcher::SavedVariable ids;
  int64_t padding_idx = -1;
  double scale = 1.0;
  bool scale_grad_by_freq = false;
  int64_t vocabulary_start = -1;
};

Tensor embedding_backward_autograd(const Tensor& gradient, const Tensor& ids,
                                   c10::SymInt num_embeddings, int64_t padding_idx, double scale,
                                   bool scale_grad_by_freq, int64_t vocabulary_start) {
  auto node = dispatcher::node_for<EmbeddingBackwardBackward>(gradient);
  if (node) {
    node->ids = dispatcher::save(ids);
    node->padding_idx = padding_idx;
    node->scale = scale;
    node->scale_grad_by_freq = scale_grad_by_freq;
    node->vocabulary_start = vocabulary_start;
  }
  return dispatcher::linear(node, gradient, [&](const Tensor& rows) {
    return call_embedding_backward(rows, ids, num_embeddings, padding_idx, scale,
                                   scale_grad_by_freq, vocabulary_start);
  });
}

class EmbeddingRowsBackward : public RowsNode<EmbeddingRowsBackward> {
 public:
  static constexpr const char* label = "EmbeddingRowsBackward";
};

std::tuple<Tensor, Tensor> embedding_backward_rows_autograd(
    const Tensor& gradient, const Tensor& ids, c10::SymInt num_embeddings, int64_t padding_idx,
    double scale, bool scale_grad_by_freq, int64_t vocabulary_start) {
  const auto call = [&] {
    return call_embedding_backward_rows(gradient, ids, num_embeddings, padding_idx, scale,
                                        scale_grad_by_freq, vocabulary_start);
  };
  return underived_rows<EmbeddingRowsBackward>(call, gradient);
}

}  // namespace

Tensor table_gradient(const Tensor& gradient, const Tensor& ids, const c10::SymInt& num_embeddings,
                      int64_t padding_idx, double scale, bool scale_grad_by_freq, Text form,
                      int64_t vocabulary_start) {
  if (form == "dense") {
    return call_embedding_backward(gradient, ids, num_embeddings, padding_idx, scale,
                                   scale_grad_by_freq, vocabulary_start);
  }
  const auto [row_ids, rows] = call_embedding_backward_rows(
      gradient, ids, num_embeddings, padding_idx, scale, scale_grad_by_freq, vocabulary_start);
  return sparse_gradient(row_ids, rows, num_embeddings);
}

Tensor sparse_gradient(const Tensor& row_ids, const Tensor& rows,
                       const c10::SymInt& num_embeddings) {
  return at::_sparse_coo_tensor_unsafe_symint(row_ids.unsqueeze(0), rows,
                                              {num_embeddings, rows.sym_size(-1)},
                                              rows.options().layout(at::kSparse),
                                              /*is_coalesced=*/true);
}

TORCH_LIBRARY_IMPL(posembed, Autograd, m) {
  m.impl("embedding", embedding_autograd);
  m.impl("embedding_backward", embedding_backward_autograd);
  m.impl("embedding_backward_rows", embedding_backward_rows_autograd);
}

}  // namespace posembed::token
