// Derivatives of the bag operators. A weighted sum is linear in the table and in the weights, so
// the derivatives of the sum and of its two gradients are these three operators again. A maximum
// stores the places it took; its derivative selects their elements.
#include <ATen/ops/gather.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "bag/operator.h"
#include "dispatcher/autograd.h"
#include "dispatcher/tangent.h"
#include "token/operator.h"
#include "token/rows_node.h"

namespace posembed::bag {
namespace {

using dispatcher::SavedVariable;
using dispatcher::variable_list;

/// A call's Places, saved in the members of a node.
struct SavedPlaces {
  SavedVariable ids, offsets;
  int64_t padding_idx = -1;
  bool include_last_offset = false;

  template <typename Visitor>
  void members(Visitor& visit) {
    visit(ids);
    visit(offsets);
    visit(padding_idx);
    visit(include_last_offset);
  }

  void save(const Places& places) {
    ids = dispatcher::save(places.ids);
    offsets = dispatcher::save(places.offsets);
    padding_idx = places.padding_idx;
    include_last_offset = places.include_last_offset;
  }
};

/// The tensors of SavedPlaces, which Places refers to.
class Unpacked {
 public:
  explicit Unpacked(const SavedPlaces& saved)
      : saved_(saved),
        ids_(*dispatcher::unpack(saved.ids)),
        offsets_(dispatcher::unpack(saved.offsets)) {}

  Places places() const { return {ids_, offsets_, saved_.padding_idx, saved_.include_last_offset}; }

 private:
  const SavedPlaces& saved_;
  Tensor ids_;
  MaybeTensor offsets_;
};

Tensor or_undefined(const MaybeTensor& tensor) { return tensor.value_or(Tensor()); }

MaybeTensor if_defined(const Tensor& tensor) {
  return tensor.defined() ? MaybeTensor(tensor) : std::nullopt;
}

/// The gradient of the table. `form`: "dense", or "rows" for a sparse tensor of the touched rows.
Tensor table_gradient(const Tensor& gradient, const Places& places, const MaybeTensor& weights,
                      const MaybeTensor& maxima, const c10::SymInt& rows, Text mode, Text form) {
  if (form == "dense") {
    return call_token_bag_backward(gradient, places, weights, maxima, rows, mode);
  }
  const auto [row_ids, values] =
      call_token_bag_backward_rows(gradient, places, weights, maxima, rows, mode);
  return token::sparse_gradient(row_ids, values, rows);
}

/// The elements of `table` that a maximum took; zeros for empty bags.
Tensor choose(const Tensor& table, const Tensor& ids, const Tensor& maxima) {
  if (ids.sym_numel() == 0) return at::zeros_symint(maxima.sym_sizes(), table.options());
  const Tensor rows = ids.reshape(-1).index_select(0, maxima.clamp_min(0).reshape(-1));
  // On CUDA a bag may contain only ids outside the table.
  const Tensor none = maxima.lt(0);
  const Tensor taken = rows.to(at::kLong).view_symint(maxima.sym_sizes()).masked_fill(none, 0);
  return at::gather(table, 0, taken).masked_fill(none, 0);
}

// ------------------------------------------------------------------------------- sum and mean

class TokenBagBackward : public dispatcher::OperatorNode<TokenBagBackward> {
 public:
  static constexpr const char* label = "TokenBagBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    places.members(visit);
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
    const Unpacked in(places);
    if (needs(0)) {
      result[0] = table_gradient(gradient, in.places(), dispatcher::unpack(weights), std::nullopt,
                                 rows, mode, form);
    }
    if (needs(1)) {
      result[1] =
          call_token_bag_weights_backward(gradient, *dispatcher::unpack(weight), in.places());
    }
    return result;
  }

  SavedPlaces places;
  SavedVariable weight;  // saved if the weights need a gradient
  SavedVariable weights;
  c10::SymInt rows;
  std::string mode, form;
};

bool wants_derivative(const Tensor& tensor) {
  return torch::autograd::compute_requires_grad(tensor) || dispatcher::tangent(tensor).defined();
}

Tensor token_bag_autograd(const Tensor& weight, const Tensor& ids, const MaybeTensor& offsets,
                          const MaybeTensor& weights, Text mode, int64_t padding_idx,
                          bool include_last_offset, Text gradient) {
  const Places places{ids, offsets, padding_idx, include_last_offset};
  if (mode == "max" && !weights.has_value() && wants_derivative(weight)) {
    return std::get<0>(call_token_bag_max(weight, places, gradient));
  }
  const Tensor factors = or_undefined(weights);
  auto node = dispatcher::node_for<TokenBagBackward>(weight, factors);
  if (node) {
    node->places.save(places);
    if (factors.defined() && factors.requires_grad()) node->weight = dispatcher::save(weight);
    node->weights = dispatcher::save(weights);
    node->rows = weight.sym_size(0);
    node->mode = mode;
    node->form = gradient;
  }
  return dispatcher::bilinear(node, weight, factors, [&](const Tensor& table, const Tensor& by) {
    return call_token_bag(table, places, if_defined(by), mode, gradient);
  });
}

// ------------------------------------------------------------------------------------ maximum

class TokenBagMaxBackward : public dispatcher::OperatorNode<TokenBagMaxBackward> {
 public:
  static constexpr const char* label = "TokenBagMaxBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    places.members(visit);
    visit(maxima);
    visit(rows);
    visit(form);
  }

  variable_list backward(variable_list&& gradients) {
    if (!gradients[0].defined()) return {Tensor()};
    return {table_gradient(gradients[0], Unpacked(places).places(), std::nullopt,
                           dispatcher::unpack(maxima), rows, "max", form)};
  }

  SavedPlaces places;
  SavedVariable maxima;
  c10::SymInt rows;
  std::string form;
};

std::tuple<Tensor, Tensor> token_bag_max_autograd(const Tensor& weight, const Tensor& ids,
                                                  const MaybeTensor& offsets, int64_t padding_idx,
                                                  bool include_last_offset, Text gradient) {
  const Places places{ids, offsets, padding_idx, include_last_offset};
  auto node = dispatcher::node_for<TokenBagMaxBackward>(weight);
  std::tuple<Tensor, Tensor> outputs =
      dispatcher::below_autograd([&] { return call_token_bag_max(weight, places, gradient); });
  auto& [output, maxima] = outputs;
  if (node) {
    node->places.save(places);
    node->rows = weight.sym_size(0);
    node->form = gradient;
    node->maxima = dispatcher::save(maxima);
    torch::autograd::set_history(output, node);
  }
  if (const Tensor direction = dispatcher::tangent(weight); direction.defined()) {
    dispatcher::set_tangent(output, choose(direction, ids, maxima));
  }
  return outputs;
}

// ------------------------------------------------------------------------- the table's gradient

class TokenBagBackwardBackward : public dispatcher::OperatorNode<TokenBagBackwardBackward> {
 public:
  static constexpr const char* label = "TokenBagBackwardBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    places.members(visit);
    visit(gradient);
    visit(weights);
    visit(maxima);
    visit(mode);
  }

  variable_list backward(variable_list&& gradients) {
    variable_list result(2);
    const Tensor& table = gradients[0];
    if (!table.defined()) return result;
    const Unpacked in(places);
    if (needs(0)) {
      const MaybeTensor chosen = dispatcher::unpack(maxima);
      result[0] = chosen.has_value()
                      ? choose(table, in.places().ids, *chosen)
                      : call_token_bag(table, in.places(), dispatcher::unpack(weights), mode);
    }
    if (needs(1)) {
      result[1] =
          call_token_bag_weights_backward(*dispatcher::unpack(gradient), table, in.places());
    }
    return result;
  }

  SavedPlaces places;
  SavedVariable gradient;  // saved if the weights need a gradient
  SavedVariable weights, maxima;
  std::string mode;
};

Tensor token_bag_backward_autograd(const Tensor& gradient, const Tensor& ids,
                                   const MaybeTensor& offsets, const MaybeTensor& weights,
                                   const MaybeTensor& maxima, c10::SymInt num_embeddings, Text mode,
                                   int64_t padding_idx, bool include_last_offset) {
  const Places places{ids, offsets, padding_idx, include_last_offset};
  const Tensor factors = or_undefined(weights);
  auto node = dispatcher::node_for<TokenBagBackwardBackward>(gradient, factors);
  if (node) {
    node->places.save(places);
    if (factors.defined() && factors.requires_grad()) node->gradient = dispatcher::save(gradient);
    node->weights = dispatcher::save(weights);
    node->maxima = dispatcher::save(maxima);
    node->mode = mode;
  }
  return dispatcher::bilinear(node, gradient, factors, [&](const Tensor& rows, const Tensor& by) {
    return call_token_bag_backward(rows, places, if_defined(by), maxima, num_embeddings, mode);
  });
}

class TokenBagRowsBackward : public token::RowsNode<TokenBagRowsBackward> {
 public:
  static constexpr const char* label = "TokenBagRowsBackward";
};

std::tuple<Tensor, Tensor> token_bag_backward_rows_autograd(
    const Tensor& gradient, const Tensor& ids, const MaybeTensor& offsets,
    const MaybeTensor& weights, const MaybeTensor& maxima, c10::SymInt num_embeddings, Text mode,
    int64_t padding_idx, bool include_last_offset) {
  const auto call = [&] {
    return call_token_bag_backward_rows(gradient, {ids, offsets, padding_idx, include_last_offset},
                                        weights, maxima, num_embeddings, mode);
  };
  return token::underived_rows<TokenBagRowsBackward>(call, gradient, or_undefined(weights));
}

// ----------------------------------------------------------------------- the weights' gradient

class TokenBagWeightsBackward : public dispatcher::OperatorNode<TokenBagWeightsBackward> {
 public:
  static constexpr const char* label = "TokenBagWeightsBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    places.members(visit);
    visit(gradient);
    visit(weight);
  }

  variable_list backward(variable_list&& gradients) {
    variable_list result(2);
    const Tensor& weights = gradients[0];
    if (!weights.defined()) return result;
    const Unpacked in(places);
    const Tensor table = *dispatcher::unpack(weight);
    if (needs(0)) result[0] = call_token_bag(table, in.places(), weights, "sum");
    if (needs(1)) {
      result[1] = call_token_bag_backward(*dispatcher::unpack(gradient), in.places(), weights,
                                          std::nullopt, table.sym_size(0), "sum");
    }
    return result;
  }

  SavedPlaces places;
  SavedVariable gradient, weight;
};

Tensor token_bag_weights_backward_autograd(const Tensor& gradient, const Tensor& weight,
                                           const Tensor& ids, const MaybeTensor& offsets,
                                           int64_t padding_idx, bool include_last_offset) {
  const Places places{ids, offsets, padding_idx, include_last_offset};
  auto node = dispatcher::node_for<TokenBagWeightsBackward>(gradient, weight);
  if (node) {
    node->places.save(places);
    node->gradient = dispatcher::save(gradient);
    node->weight = dispatcher::save(weight);
  }
  return dispatcher::bilinear(node, gradient, weight, [&](const Tensor& rows, const Tensor& table) {
    return call_token_bag_weights_backward(rows, table, places);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(posembed, Autograd, m) {
  m.impl("token_bag", token_bag_autograd);
  m.impl("token_bag_max", token_bag_max_autograd);
  m.impl("token_bag_backward", token_bag_backward_autograd);
  m.impl("token_bag_backward_rows", token_bag_backward_rows_autograd);
  m.impl("token_bag_weights_backward", token_bag_weights_backward_autograd);
}

}  // namespace posembed::bag
