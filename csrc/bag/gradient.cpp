// Derivatives of the bag operators. A weighted sum is linear in the table and in the weights, so
// the derivatives of the sum and of its two gradients are these three operators again. A maximum
// saves the indices of the elements it took; its derivative selects the elements there.
#include <ATen/ops/gather.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "bag/operator.h"
#include "dispatcher/autograd.h"
#include "dispatcher/saved_call.h"
#include "dispatcher/tangent.h"
#include "token/operator.h"
#include "token/rows_node.h"

namespace posembed::bag {
namespace {

using dispatcher::SavedVariable;
using dispatcher::variable_list;

Tensor or_undefined(const MaybeTensor& tensor) { return tensor.value_or(Tensor()); }

MaybeTensor if_defined(const Tensor& tensor) {
  return tensor.defined() ? MaybeTensor(tensor) : std::nullopt;
}

/// The gradient of the table. `form`: "dense", or "rows" for a sparse tensor of the touched rows.
Tensor table_gradient(const Tensor& gradient, const c10::SymInt& rows, const Bag& in, Text mode,
                      const MaybeTensor& weights, const MaybeTensor& maxima, Text form) {
  if (form == "dense") {
    return token_bag_backward(gradient, rows, in, mode, weights, maxima);
  }
  const auto [row_ids, values] = token_bag_backward_rows(gradient, rows, in, mode, weights, maxima);
  return token::sparse_gradient(row_ids, values, rows);
}

/// The elements of `table` that a maximum took. Zeros for empty bags, and for a maximum or an id
/// that does not exist: an out-of-range look-up by torch would destroy the CUDA context.
Tensor choose(const Tensor& table, const Tensor& ids, const Tensor& maxima) {
  if (ids.sym_numel() == 0) return at::zeros_symint(maxima.sym_sizes(), table.options());
  const Tensor none = maxima.lt(0).logical_or(maxima.ge(ids.sym_numel()));
  const Tensor indices = maxima.masked_fill(none, 0).reshape(-1);
  const Tensor rows =
      ids.reshape(-1).index_select(0, indices).to(at::kLong).view_symint(maxima.sym_sizes());
  const Tensor left_out = none.logical_or(rows.lt(0)).logical_or(rows.ge(table.sym_size(0)));
  return at::gather(table, 0, rows.masked_fill(left_out, 0)).masked_fill(left_out, 0);
}

// ------------------------------------------------------------------------------- sum and mean

class TokenBagNode : public dispatcher::OperatorNode<TokenBagNode> {
 public:
  static constexpr const char* label = "TokenBagBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    bag.members(visit);
    visit(weight);
    visit(weights);
    visit(rows);
    visit(mode);
    visit(form);
  }

  variable_list backward(variable_list&& gradients) {
    variable_list result(2);
    const Tensor& gradient = gradients[0];
    if (!gradient.defined()) return result;
    const Bag in = bag.unpack();
    if (needs(0)) {
      result[0] =
          table_gradient(gradient, rows, in, mode, dispatcher::unpack(weights), std::nullopt, form);
    }
    if (needs(1)) {
      result[1] = token_bag_weights_backward(gradient, *dispatcher::unpack(weight), in);
    }
    return result;
  }

  dispatcher::SavedCall<Bag> bag;
  SavedVariable weight;  // saved if the weights need a gradient
  SavedVariable weights;
  c10::SymInt rows;
  std::string mode, form;
};

bool wants_derivative(const Tensor& tensor) {
  return torch::autograd::compute_requires_grad(tensor) || dispatcher::tangent(tensor).defined();
}

Tensor bag_autograd(const Tensor& weight, const Bag& in, Text mode, const MaybeTensor& weights,
                    Text gradient) {
  if (mode == "max" && !weights.has_value() && wants_derivative(weight)) {
    return std::get<0>(token_bag_max(weight, in, gradient));
  }
  const Tensor factors = or_undefined(weights);
  auto node = dispatcher::node_for<TokenBagNode>(weight, factors);
  if (node) {
    node->bag.save(in);
    if (factors.defined() && factors.requires_grad()) node->weight = dispatcher::save(weight);
    node->weights = dispatcher::save(weights);
    node->rows = weight.sym_size(0);
    node->mode = mode;
    node->form = gradient;
  }
  return dispatcher::bilinear(node, weight, factors,
                              [&](const Tensor& table, const Tensor& scales) {
                                return token_bag(table, in, mode, if_defined(scales), gradient);
                              });
}

// ------------------------------------------------------------------------------------ maximum

class TokenBagMaxNode : public dispatcher::OperatorNode<TokenBagMaxNode> {
 public:
  static constexpr const char* label = "TokenBagMaxBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    bag.members(visit);
    visit(maxima);
    visit(rows);
    visit(form);
  }

  variable_list backward(variable_list&& gradients) {
    if (!gradients[0].defined()) return {Tensor()};
    return {table_gradient(gradients[0], rows, bag.unpack(), "max", std::nullopt,
                           dispatcher::unpack(maxima), form)};
  }

  dispatcher::SavedCall<Bag> bag;
  SavedVariable maxima;
  c10::SymInt rows;
  std::string form;
};

std::tuple<Tensor, Tensor> max_autograd(const Tensor& weight, const Bag& in, Text gradient) {
  auto node = dispatcher::node_for<TokenBagMaxNode>(weight);
  std::tuple<Tensor, Tensor> outputs =
      dispatcher::below_autograd([&] { return token_bag_max(weight, in, gradient); });
  auto& [output, maxima] = outputs;
  if (node) {
    node->bag.save(in);
    node->rows = weight.sym_size(0);
    node->form = gradient;
    node->maxima = dispatcher::save(maxima);
    torch::autograd::set_history(output, node);
  }
  if (const Tensor direction = dispatcher::tangent(weight); direction.defined()) {
    dispatcher::set_tangent(output, choose(direction, in.ids, maxima));
  }
  return outputs;
}

// ------------------------------------------------------------------------- the table's gradient

class TokenBagBackwardNode : public dispatcher::OperatorNode<TokenBagBackwardNode> {
 public:
  static constexpr const char* label = "TokenBagBackwardBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    bag.members(visit);
    visit(gradient);
    visit(weights);
    visit(maxima);
    visit(mode);
  }

  variable_list backward(variable_list&& gradients) {
    variable_list result(2);
    const Tensor& table = gradients[0];
    if (!table.defined()) return result;
    const Bag in = bag.unpack();
    if (needs(0)) {
      const MaybeTensor chosen = dispatcher::unpack(maxima);
      result[0] = chosen.has_value()
                      ? choose(table, in.ids, *chosen)
                      : token_bag(table, in, mode, dispatcher::unpack(weights), "dense");
    }
    if (needs(1)) {
      result[1] = token_bag_weights_backward(*dispatcher::unpack(gradient), table, in);
    }
    return result;
  }

  dispatcher::SavedCall<Bag> bag;
  SavedVariable gradient;  // saved if the weights need a gradient
  SavedVariable weights, maxima;
  std::string mode;
};

Tensor backward_autograd(const Tensor& gradient, c10::SymInt num_embeddings, const Bag& in,
                         Text mode, const MaybeTensor& weights, const MaybeTensor& maxima) {
  const Tensor factors = or_undefined(weights);
  auto node = dispatcher::node_for<TokenBagBackwardNode>(gradient, factors);
  if (node) {
    node->bag.save(in);
    if (factors.defined() && factors.requires_grad()) node->gradient = dispatcher::save(gradient);
    node->weights = dispatcher::save(weights);
    node->maxima = dispatcher::save(maxima);
    node->mode = mode;
  }
  return dispatcher::bilinear(
      node, gradient, factors, [&](const Tensor& rows, const Tensor& scales) {
        return token_bag_backward(rows, num_embeddings, in, mode, if_defined(scales), maxima);
      });
}

class TokenBagRowsNode : public token::RowsNode<TokenBagRowsNode> {
 public:
  static constexpr const char* label = "TokenBagRowsBackward";
};

std::tuple<Tensor, Tensor> backward_rows_autograd(const Tensor& gradient,
                                                  c10::SymInt num_embeddings, const Bag& in,
                                                  Text mode, const MaybeTensor& weights,
                                                  const MaybeTensor& maxima) {
  const auto call = [&] {
    return token_bag_backward_rows(gradient, num_embeddings, in, mode, weights, maxima);
  };
  return token::underived_rows<TokenBagRowsNode>(call, gradient, or_undefined(weights));
}

// ----------------------------------------------------------------------- the weights' gradient

class TokenBagWeightsNode : public dispatcher::OperatorNode<TokenBagWeightsNode> {
 public:
  static constexpr const char* label = "TokenBagWeightsBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    bag.members(visit);
    visit(gradient);
    visit(weight);
  }

  variable_list backward(variable_list&& gradients) {
    variable_list result(2);
    const Tensor& weights = gradients[0];
    if (!weights.defined()) return result;
    const Bag in = bag.unpack();
    const Tensor table = *dispatcher::unpack(weight);
    if (needs(0)) result[0] = token_bag(table, in, "sum", weights, "dense");
    if (needs(1)) {
      result[1] = token_bag_backward(*dispatcher::unpack(gradient), table.sym_size(0), in, "sum",
                                     weights, std::nullopt);
    }
    return result;
  }

  dispatcher::SavedCall<Bag> bag;
  SavedVariable gradient, weight;
};

Tensor weights_backward_autograd(const Tensor& gradient, const Tensor& weight, const Bag& in) {
  auto node = dispatcher::node_for<TokenBagWeightsNode>(gradient, weight);
  if (node) {
    node->bag.save(in);
    node->gradient = dispatcher::save(gradient);
    node->weight = dispatcher::save(weight);
  }
  return dispatcher::bilinear(node, gradient, weight, [&](const Tensor& rows, const Tensor& table) {
    return token_bag_weights_backward(rows, table, in);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  token_bag.differentiate<bag_autograd>(m);
  token_bag_max.differentiate<max_autograd>(m);
  token_bag_backward.differentiate<backward_autograd>(m);
  token_bag_backward_rows.differentiate<backward_rows_autograd>(m);
  token_bag_weights_backward.differentiate<weights_backward_autograd>(m);
}

}  // namespace posembed::bag
