// Derivatives of the input operators. The usual backward pass is one kernel for dropout and norm,
// then the tables' own gradients. Higher derivatives and tangents use the same formulas as a chain
// of differentiable operators.
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <array>
#include <tuple>

#include "dispatcher/autograd.h"
#include "input/input_operator.h"
#include "learned/learned_operator.h"
#include "token/token_operator.h"

namespace posembed::input {
namespace {

/// The types of all tokens: zeros if none were given.
Tensor types_of(const Input& in) {
  return in.types().has_value() ? *in.types() : at::zeros_like(in.ids);
}

/// The table rows of given positions, [batch, seq].
Tensor position_rows(const Input& in) {
  return at::add(*in.positions(), in.first_row()).expand_symint(in.ids.sym_sizes());
}

/// The table rows of counted positions.
learned::Rows counted_rows(const Input& in) { return {std::nullopt, in.offset(), in.first_row()}; }

// -------------------------------------------------------------------- as a chain of operators

/// Rows of a table; an index outside it was recorded by the forward kernel, and has a row of zeros.
Tensor look_up(const Tensor& table, const Tensor& ids, int64_t padding_idx = -1) {
  return token::look_up(table, {ids, padding_idx, 1.0, false, /*vocabulary_start=*/0});
}

/// A result that the call has not.
Tensor none(const Tensor& like) { return at::empty({0}, like.options()); }

/// The sum of token, type and position, in the compute type.
Tensor sum_of(const Input& in) {
  const at::ScalarType type = compute_type(in.token);
  Tensor sum = at::mul(look_up(in.token, in.ids, in.padding_idx()).to(type), in.scale());
  if (in.token_type().has_value()) {
    sum = at::add(sum, look_up(*in.token_type(), types_of(in)).to(type));
  }
  if (!in.sinusoid().empty()) sum = at::add(sum, encoding(in));
  if (!in.position().has_value()) return sum;
  const Tensor table = in.position()->to(type);
  if (counts_positions(in)) {
    return at::add(sum, learned::learned_add(at::zeros_like(sum), table, counted_rows(in)));
  }
  return at::add(sum, look_up(table, position_rows(in), in.position_padding_idx()));
}

Tensor drop(const Input& in, const Tensor& x) {
  if (!drops(in)) return x;
  return input_dropout(x, *in.seed(), in.dropout(), in.first_token() * in.token.sym_size(1));
}

/// The gradients of the tables that need no sort, computed from the gradient of the sum.
Backward with_tables(const Input& in, const Tensor& sum, const Tensor& weight, const Tensor& bias) {
  Tensor position = none(sum), type = none(sum);
  if (counts_positions(in)) {
    position = learned::learned_backward(sum, in.position()->sym_size(0), counted_rows(in));
  }
  if (has_few_types(in)) {
    type = token::embedding_backward(sum, in.token_type()->sym_size(0), {types_of(in)});
  }
  return {changes(in) ? sum : none(sum), weight, bias, position, type};
}

bool has_tangent(const Tensor& tensor) { return dispatcher::tangent(tensor).defined(); }
bool has_tangent(const MaybeTensor& tensor) { return tensor.has_value() && has_tangent(*tensor); }

bool has_tangent(const Input& in) {
  return has_tangent(in.token) || has_tangent(in.position()) || has_tangent(in.token_type()) ||
         has_tangent(in.norm_weight()) || has_tangent(in.norm_bias());
}

bool requires_grad(const Input& in) {
  return torch::autograd::compute_requires_grad(in.token, in.position(), in.token_type(),
                                                in.norm_weight(), in.norm_bias());
}

// ---------------------------------------------------------------------- by the fused kernels

/// A placeholder table of `rows` rows in the dtype and width of `gradient`; std::nullopt without
/// `rows`.
MaybeTensor size_alone(const std::optional<c10::SymInt>& rows, const Tensor& gradient) {
  if (!rows.has_value()) return std::nullopt;
  const c10::SymInt dim = gradient.sym_size(-1);
  return at::empty_symint({1, dim}, gradient.options()).expand_symint({*rows, dim});
}

std::optional<c10::SymInt> rows_of(const MaybeTensor& table) {
  return table.has_value() ? std::optional(table->sym_size(0)) : std::nullopt;
}

class InputEmbeddingBackward : public dispatcher::OperatorNode<InputEmbeddingBackward> {
 public:
  static constexpr const char* label = "InputEmbeddingBackward";

  /// Edges in the order of the inputs of node_for.
  enum Edge : size_t { token_edge, position_edge, type_edge, weight_edge, bias_edge, edges };

  template <typename Visitor>
  void members(Visitor& visit) {
    call.members(visit);
    visit(mean);
    visit(rstd);
    visit(token_table_rows);
    visit(position_table_rows);
    visit(type_table_rows);
  }

  /// Saves the inputs. Without a norm, only the number of rows of each table is needed.
  void keep(const Input& in) {
    Input kept = in;
    if (!norms(in)) {
      token_table_rows = rows_of(in.token);
      position_table_rows = rows_of(in.position());
      type_table_rows = rows_of(in.token_type());
      kept.token.reset();
      kept.position().reset();
      kept.token_type().reset();
    }
    call.save(kept);
  }

  dispatcher::variable_list backward(dispatcher::variable_list&& gradients) {
    dispatcher::variable_list result(edges);
    if (!gradients[0].defined()) return result;
    const Input in = input(gradients[0]);
    Tensor sum = gradients[0];
    if (needs_rows(in)) {
      auto [row_ids, rows, weight, bias, position, type] =
          input_embedding_backward_rows(sum, mean.unpack(), rstd.unpack(), in);
      take(in, {Tensor(), weight, bias, position, type}, result);
      result[token_edge] = token::sparse_gradient(row_ids, rows, in.token.sym_size(0));
      return result;
    }
    if (changes(in) || counts_positions(in) || has_few_types(in)) {
      const Backward parts = input_embedding_backward(sum, mean.unpack(), rstd.unpack(), in);
      if (changes(in)) sum = std::get<0>(parts);
      take(in, parts, result);
    }
    sort_tables(in, sum, result);
    return result;
  }

  dispatcher::SavedCall<Input> call;
  dispatcher::SavedVariable mean, rstd;
  std::optional<c10::SymInt> token_table_rows, position_table_rows, type_table_rows;

 private:
  bool sorts_positions(const Input& in) const {
    return in.position().has_value() && in.positions().has_value() && needs(position_edge);
  }
  bool sorts_types(const Input& in) const {
    return in.token_type().has_value() && !has_few_types(in) && needs(type_edge);
  }
  /// Whether only the token table's rows need the gradient of the sum.
  bool needs_rows(const Input& in) const {
    return in.gradient() == TableGradient::rows && needs(token_edge) && changes(in) &&
           !sorts_positions(in) && !sorts_types(in);
  }

  /// Moves the gradients after that of the sum to `result`.
  static void take(const Input& in, const Backward& parts, dispatcher::variable_list& result) {
    if (in.norm_weight().has_value()) result[weight_edge] = std::get<1>(parts);
    if (in.norm_bias().has_value()) result[bias_edge] = std::get<2>(parts);
    if (counts_positions(in)) result[position_edge] = std::get<3>(parts);
    if (has_few_types(in)) result[type_edge] = std::get<4>(parts);
  }

  /// The gradients of tables whose rows are indexed in any order.
  void sort_tables(const Input& in, const Tensor& sum, dispatcher::variable_list& result) const {
    if (needs(token_edge) && in.own_rows) {
      const Tensor rows = sum.reshape_symint({in.token.sym_size(0), in.token.sym_size(1)});
      result[token_edge] = in.scale() == 1.0 ? rows : at::mul(rows, in.scale());
    } else if (needs(token_edge)) {
      result[token_edge] =
          token::table_gradient(sum, in.token.sym_size(0), {in.ids, in.padding_idx(), in.scale()},
                                posembed::name(in.gradient()));
    }
    if (sorts_positions(in)) {
      result[position_edge] = token::embedding_backward(
          sum, in.position()->sym_size(0), {position_rows(in), in.position_padding_idx()});
    }
    if (sorts_types(in)) {
      result[type_edge] =
          token::embedding_backward(sum, in.token_type()->sym_size(0), {types_of(in)});
    }
  }

  Input input(const Tensor& gradient) const {
    Input in = call.unpack();
    if (norms(in)) return in;
    in.token = *size_alone(token_table_rows, gradient);
    in.position() = size_alone(position_table_rows, gradient);
    in.token_type() = size_alone(type_table_rows, gradient);
    return in;
  }
};

/// A separate operator also for autograd: an outer torch.func transform differentiates this call.
/// Mean and rstd need no derivatives, because the chain does not use them.
Forward forward_autograd(const Input& in) {
  auto node = dispatcher::node_for<InputEmbeddingBackward>(in.token, in.position(), in.token_type(),
                                                           in.norm_weight(), in.norm_bias());
  Forward outputs = dispatcher::below_autograd([&] { return input_embedding_forward(in); });
  auto& [output, mean, rstd] = outputs;
  if (has_tangent(in)) {
    output = std::get<0>(forward_chain(in));
  } else if (node) {
    node->keep(in);
    node->mean = dispatcher::save(mean);
    node->rstd = dispatcher::save(rstd);
    torch::autograd::set_history(output, node);
  }
  return outputs;
}

Tensor output_autograd(const Input& in) {
  if (requires_grad(in) || has_tangent(in)) return std::get<0>(forward_autograd(in));
  return dispatcher::below_autograd([&] { return input_embedding(in); });
}

/// Whether the backward pass itself must be differentiable.
bool is_derived(const Input& in, const Tensor& gradient) {
  return torch::autograd::compute_requires_grad(gradient) || requires_grad(in) ||
         has_tangent(gradient) || has_tangent(in);
}

Backward backward_autograd(const Tensor& gradient, const Tensor& mean, const Tensor& rstd,
                           const Input& in) {
  if (is_derived(in, gradient)) return backward_chain(in, gradient);
  return dispatcher::below_autograd(
      [&] { return input_embedding_backward(gradient, mean, rstd, in); });
}

BackwardRows backward_rows_autograd(const Tensor& gradient, const Tensor& mean, const Tensor& rstd,
                                    const Input& in) {
  if (is_derived(in, gradient)) return with_rows(in, gradient, backward_chain(in, gradient));
  return dispatcher::below_autograd(
      [&] { return input_embedding_backward_rows(gradient, mean, rstd, in); });
}

/// Dropout is linear, so its mask applies to tangents and gradients too.
Tensor dropout_transpose(const Tensor& gradient, const dispatcher::Shape&, const Tensor& seed,
                         double probability, const c10::SymInt& first) {
  return input_dropout(gradient, seed, probability, first);
}

}  // namespace

Forward forward_chain(const Input& in) {
  const Tensor sum = sum_of(in);
  const bool centred = in.norm() == InputNorm::layer;
  dispatcher::Normed normed{sum, none(sum)};
  if (norms(in)) normed = dispatcher::norm_chain(sum, centred, in.eps());
  Tensor x = normed.rows;
  if (in.norm_weight().has_value()) x = at::mul(x, *in.norm_weight());
  if (in.norm_bias().has_value()) x = at::add(x, *in.norm_bias());
  return {drop(in, x).to(in.token.scalar_type()), centred ? sum.mean(-1) : none(sum),
          normed.rstd.squeeze(-1)};
}

Backward backward_chain(const Input& in, const Tensor& output_gradient) {
  const at::ScalarType type = in.token.scalar_type();
  Tensor gradient = drop(in, output_gradient.to(compute_type(in.token)));
  Tensor weight_gradient = none(in.token), bias_gradient = none(in.token);
  if (!norms(in)) return with_tables(in, gradient.to(type), weight_gradient, bias_gradient);
  const bool centred = in.norm() == InputNorm::layer;
  const dispatcher::Normed x = dispatcher::norm_chain(sum_of(in), centred, in.eps());
  const std::array<int64_t, 2> tokens = {0, 1};
  if (in.norm_bias().has_value()) bias_gradient = gradient.sum(tokens).to(type);
  if (in.norm_weight().has_value()) {
    weight_gradient = at::mul(gradient, x.rows).sum(tokens).to(type);
    gradient = at::mul(gradient, *in.norm_weight());
  }
  const Tensor sum_gradient = dispatcher::norm_backward_chain(x, centred, gradient);
  return with_tables(in, sum_gradient.to(type), weight_gradient, bias_gradient);
}

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  input_embedding.differentiate<output_autograd>(m);
  input_embedding_forward.differentiate<forward_autograd>(m);
  input_embedding_backward.differentiate<backward_autograd>(m);
  input_embedding_backward_rows.differentiate<backward_rows_autograd>(m);
  dispatcher::differentiate_linear<input_dropout, dropout_transpose>(m);
}

}  // namespace posembed::input
