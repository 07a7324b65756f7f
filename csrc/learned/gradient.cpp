// Derivatives of the learned-position operators. Adding rows and summing them are each other's
// transpose, so nodes save only positions.
#include <ATen/ops/add.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "dispatcher/autograd.h"
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
    visit(positions);
    visit(rows);
    visit(offset);
    visit(first_row);
  }

  dispatcher::variable_list backward(dispatcher::variable_list&& gradients) {
    const Tensor& gradient = gradients[0];
    if (!gradient.defined() || !needs(1)) return {gradient, Tensor()};
    return {gradient, call_learned_backward(gradient, dispatcher::unpack(positions), rows, offset,
                                            first_row)};
  }

  dispatcher::SavedVariable positions;
  c10::SymInt rows;
  c10::SymInt offset;
  int64_t first_row = 0;
};

/// The tangent of x + rows of weight, from the tangents of both.
Tensor add_tangent(const Tensor& x, const Tensor& weight, const MaybeTensor& positions,
                   const c10::SymInt& offset, int64_t first_row) {
  const Tensor rows = dispatcher::tangent(weight);
  if (!rows.defined()) return dispatcher::copied_tangent(x);
  Tensor direction = dispatcher::tangent(x);
  if (!direction.defined()) direction = at::zeros_like(x);
  return call_learned_add(direction, rows, positions, offset, first_row);
}

Tensor learned_add_autograd(const Tensor& x, const Tensor& weight, const MaybeTensor& positions,
                            c10::SymInt offset, int64_t first_row) {
  auto node = dispatcher::node_for<LearnedAddBackward>(x, weight);
  if (node) {
    node->positions = dispatcher::save(positions);
    node->rows = weight.sym_size(0);
    node->offset = offset;
    node->first_row = first_row;
  }
  Tensor output = dispatcher::below_autograd(
      [&] { return call_learned_add(x, weight, positions, offset, first_row); });
  if (node) torch::autograd::set_history(output, node);
  dispatcher::set_tangent(output, add_tangent(x, weight, positions, offset, first_row));
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
    return {token::call_embedding_backward(gradients[0], ids, rows)};
  }

  dispatcher::SavedVariable positions;
  c10::SymInt rows;
  int64_t first_row = 0;
};

Tensor learned_encode_autograd(const Tensor& weight, const Tensor& positions, int64_t first_row) {
  auto node = dispatcher::node_for<LearnedEncodeBackward>(weight);
  if (node) {
    node->positions = dispatcher::save(positions);
    node->rows = weight.sym_size(0);
    node->first_row = first_row;
  }
  return dispatcher::linear(node, weight, [&](const Tensor& table) {
    return call_learned_encode(table, positions, first_row);
  });
}

/// The gradient of learned_backward: a look-up of the rows that it summed into.
class LearnedBackwardBackward : public dispatcher::OperatorNode<LearnedBackwardBackward> {
 public:
  static constexpr const char* label = "LearnedBackwardBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    visit(positions);
    visit(batch);
    visit(seq);
    visit(offset);
    visit(first_row);
  }

  dispatcher::variable_list backward(dispatcher::variable_list&& gradients) {
    const Tensor& table = gradients[0];
    if (!table.defined()) return {Tensor()};
    const MaybeTensor given = dispatcher::unpack(positions);
    const Tensor rows = given.has_value() ? call_learned_encode(table, *given, first_row)
                                          : table.narrow_symint(0, offset + first_row, seq);
    return {rows.expand_symint({batch, seq, table.sym_size(1)})};
  }

  dispatcher::SavedVariable positions;
  c10::SymInt batch, seq;
  c10::SymInt offset;
  int64_t first_row = 0;
};

Tensor learned_backward_autograd(const Tensor& gradient, const MaybeTensor& positions,
                                 c10::SymInt rows, c10::SymInt offset, int64_t first_row) {
  auto node = dispatcher::node_for<LearnedBackwardBackward>(gradient);
  if (node) {
    node->positions = dispatcher::save(positions);
    node->batch = gradient.sym_size(0);
    node->seq = gradient.sym_size(1);
    node->offset = offset;
    node->first_row = first_row;
  }
  return dispatcher::linear(node, gradient, [&](const Tensor& summed) {
    return call_learned_backward(summed, positions, rows, offset, first_row);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(posembed, Autograd, m) {
  m.impl("learned_add", learned_add_autograd);
  m.impl("learned_encode", learned_encode_autograd);
  m.impl("learned_backward", learned_backward_autograd);
}

}  // namespace posembed::learned
