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
#include "dispatcher/saved_call.h"
#include "dispatcher/tangent.h"
#include "dispatcher/tensors.h"
#include "token/operator.h"
#include "token/rows_node.h"

namespace posembed::token {
namespace {

class EmbeddingNode : public dispatcher::OperatorNode<EmbeddingNode> {
 public:
  static constexpr const char* label = "EmbeddingBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    ids.members(visit);
    visit(num_embeddings);
    visit(form);
  }

  dispatcher::variable_list backward(dispatcher::variable_list&& gradients) {
    if (!gradients[0].defined()) return {Tensor()};
    return {table_gradient(gradients[0], num_embeddings, ids.unpack(), form)};
  }

  dispatcher::SavedCall<Ids> ids;
  c10::SymInt num_embeddings;
  std::string form;
};

Tensor embedding_autograd(const Tensor& weight, const Ids& ids, Text gradient) {
  auto node = dispatcher::node_for<EmbeddingNode>(weight);
  if (node) {
    node->ids.save(ids);
    node->num_embeddings = weight.sym_size(0);
    node->form = gradient;
  }
  return dispatcher::linear(node, weight,
                            [&](const Tensor& table) { return embedding(table, ids, gradient); });
}

/// The count of each id among the ids: [..., 1], in a dtype that can hold it. 1 for ids outside the
/// table, whose rows are zeros.
Tensor counts(const Ids& in, const c10::SymInt& num_embeddings, const Tensor& like) {
  c10::SymDimVector sizes(in.ids.sym_sizes().begin(), in.ids.sym_sizes().end());
  sizes.push_back(1);
  const Tensor ones = at::ones_symint(sizes, like.options().dtype(dispatcher::compute_type(like)));
  Ids plain{in.ids};
  plain.vocabulary_start = in.vocabulary_start;
  return look_up(embedding_backward(ones, num_embeddings, plain), plain).clamp_min(1);
}

/// The gradient of embedding_backward: a look-up of the rows that it summed into.
class EmbeddingBackwardNode : public dispatcher::OperatorNode<EmbeddingBackwardNode> {
 public:
  static constexpr const char* label = "EmbeddingBackwardBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    ids.members(visit);
  }

  dispatcher::variable_list backward(dispatcher::variable_list&& gradients) {
    const Tensor& table = gradients[0];
    if (!table.defined()) return {Tensor()};
    const Ids in = ids.unpack();
    Ids plain = in;
    plain.padding_idx = -1;
    plain.scale_grad_by_freq = false;
    Tensor rows = look_up(table, plain);
    if (in.padding_idx >= 0) rows = rows.masked_fill(in.ids.eq(in.padding_idx).unsqueeze(-1), 0);
    if (in.scale_grad_by_freq) {
      rows = at::div(rows, counts(in, table.sym_size(0), table)).to(table.scalar_type());
    }
    return {rows};
  }

  dispatcher::SavedCall<Ids> ids;
};

Tensor backward_autograd(const Tensor& gradient, c10::SymInt num_embeddings, const Ids& ids) {
  auto node = dispatcher::node_for<EmbeddingBackwardNode>(gradient);
  if (node) node->ids.save(ids);
  return dispatcher::linear(node, gradient, [&](const Tensor& rows) {
    return embedding_backward(rows, num_embeddings, ids);
  });
}

class EmbeddingRowsBackward : public RowsNode<EmbeddingRowsBackward> {
 public:
  static constexpr const char* label = "EmbeddingRowsBackward";
};

std::tuple<Tensor, Tensor> backward_rows_autograd(const Tensor& gradient,
                                                  c10::SymInt num_embeddings, const Ids& ids) {
  const auto call = [&] { return embedding_backward_rows(gradient, num_embeddings, ids); };
  return underived_rows<EmbeddingRowsBackward>(call, gradient);
}

}  // namespace

Tensor table_gradient(const Tensor& gradient, const c10::SymInt& num_embeddings, const Ids& ids,
                      Text form) {
  if (form == "dense") return embedding_backward(gradient, num_embeddings, ids);
  const auto [row_ids, rows] = embedding_backward_rows(gradient, num_embeddings, ids);
  return sparse_gradient(row_ids, rows, num_embeddings);
}

Tensor sparse_gradient(const Tensor& row_ids, const Tensor& rows,
                       const c10::SymInt& num_embeddings) {
  return at::_sparse_coo_tensor_unsafe_symint(row_ids.unsqueeze(0), rows,
                                              {num_embeddings, rows.sym_size(-1)},
                                              rows.options().layout(at::kSparse),
                                              /*is_coalesced=*/true);
}

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  embedding.differentiate<embedding_autograd>(m);
  embedding_backward.differentiate<backward_autograd>(m);
  embedding_backward_rows.differentiate<backward_rows_autograd>(m);
}

}  // namespace posembed::token
