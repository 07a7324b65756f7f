// Derivatives of the learned-position operators. Adding rows and summing them are each other's
// transpose, so nodes save only positions.
#include <ATen/ops/add.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "dispatcher/autograd.h"
#include "dispatcher/saved_call.h"
#include "dispatcher/tangent.h"
#include "learned/operator.h"
#include "token/operator.h"

namespace posembed::learned {
namespace {

class LearnedAddBackward : public dispatcher::OperatorNode<LearnedAddBackward> {
 public:
  static constexpr const char* label = "LearnedAddBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    rows.members(visit);
    visit(count);
  }

  dispatcher::variable_list backward(dispatcher::variable_list&& gradients) {
    const Tensor& gradient = gradients[0];
    if (!gradient.defined() || !needs(1)) return {gradient, Tensor()};
    return {gradient, learned_backward(gradient, count, rows.unpack())};
  }

  dispatcher::SavedCall<Rows> rows;
  c10::SymInt count;  // rows of the table
};

/// The tangent of x + rows of weight, from the tangents of both.
Tensor add_tangent(const Tensor& x, const Tensor& weight, const Rows& rows) {
  const Tensor table_tangent = dispatcher::tangent(weight);
  if (!table_tangent.defined()) return dispatcher::copied_tangent(x);
  Tensor direction = dispatcher::tangent(x);
  if (!direction.defined()) direction = at::zeros_like(x);
  return learned_add(direction, table_tangent, rows);
}

Tensor add_autograd(const Tensor& x, const Tensor& weight, const Rows& rows) {
  auto node = dispatcher::node_for<LearnedAddBackward>(x, weight);
  if (node) {
    node->rows.save(rows);
    node->count = weight.sym_size(0);
  }
  Tensor output = dispatcher::below_autograd([&] { return learned_add(x, weight, rows); });
  if (node) torch::autograd::set_history(output, node);
  dispatcher::set_tangent(output, add_tangent(x, weight, rows));
  return output;
}

class LearnedEncodeBackward : public dispatcher::OperatorNode<LearnedEncodeBackward> {
 public:
  static constexpr const char* label = "LearnedEncodeBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    visit(positions);
    visit(rows);
    visit(first_row);
  }

  dispatcher::variable_list backward(dispatcher::variable_list&& gradients) {
    if (!gradients[0].defined()) return {Tensor()};
    const Tensor ids = at::add(*dispatcher::unpack(positions), first_row);
    return {token::embedding_backward(gradients[0], rows, {ids})};
  }

  dispatcher::SavedVariable positions;
  c10::SymInt rows;
  int64_t first_row = 0;
};

Tensor encode_autograd(const Tensor& weight, const Tensor& positions, int64_t first_row) {
  auto node = dispatcher::node_for<LearnedEncodeBackward>(weight);
  if (node) {
    node->positions = dispatcher::save(positions);
    node->rows = weight.sym_size(0);
    node->first_row = first_row;
  }
  return dispatcher::linear(node, weight, [&](const Tensor& table) {
    return learned_encode(table, positions, first_row);
  });
}

/// The gradient of learned_backward: a look-up of the rows that it summed into.
class LearnedBackwardBackward : public dispatcher::OperatorNode<LearnedBackwardBackward> {
 public:
  static constexpr const char* label = "LearnedBackwardBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    rows.members(visit);
    visit(batch);
    visit(seq);
  }

  dispatcher::variable_list backward(dispatcher::variable_list&& gradients) {
    const Tensor& table = gradients[0];
    if (!table.defined()) return {Tensor()};
    const Rows forward = rows.unpack();
    const Tensor looked_up =
        forward.positions.has_value()
            ? learned_encode(table, *forward.positions, forward.first_row)
            : table.narrow_symint(0, forward.offset.number() + forward.first_row, seq);
    return {looked_up.expand_symint({batch, seq, table.sym_size(1)})};
  }

  dispatcher::SavedCall<Rows> rows;
  c10::SymInt batch, seq;
};

Tensor backward_autograd(const Tensor& gradient, c10::SymInt count, const Rows& rows) {
  auto node = dispatcher::node_for<LearnedBackwardBackward>(gradient);
  if (node) {
    node->rows.save(rows);
    node->batch = gradient.sym_size(0);
    node->seq = gradient.sym_size(1);
  }
  return dispatcher::linear(
      node, gradient, [&](const Tensor& summed) { return learned_backward(summed, count, rows); });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  learned_add.differentiate<add_autograd>(m);
  learned_encode.differentiate<encode_autograd>(m);
  learned_backward.differentiate<backward_autograd>(m);
}

}  // namespace posembed::learned
