// Derivatives of the QK-norm operators. The usual backward pass, of RMSNorm by head, is one kernel.
// Those of other norms and of tables, second derivatives and tangents use the same formulas as a
// chain of differentiable operators.
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "dispatcher/autograd.h"
#include "dispatcher/norm_chain.h"
#include "dispatcher/saved_call.h"
#include "dispatcher/tangent.h"
#include "dispatcher/tensors.h"
#include "rotary/arguments.h"
#include "rotary_norm/operator.h"
#include "rotary_tables/operator.h"

namespace posembed::rotary_norm {
namespace {

// -------------------------------------------------------------------- as a chain of operators

/// One of the two tensors of a call.
struct Part {
  const Tensor& rows;
  const MaybeTensor &weight, &bias;
};

Part query_of(const Call& call) {
  return {call.query, call.query_weight, call.options.query_bias()};
}

Part key_of(const Call& call) { return {call.key, call.key_weight, call.options.key_bias()}; }

/// Exchanges the heads and what stands between them and head_dim, if anything: the same again
/// undoes it.
Tensor heads_last(const Call& call, const Tensor& tensor) {
  const bool apart = rotary::dimensions(call.options.layout()).heads < tensor.dim() - 2;
  return apart ? tensor.transpose(-3, -2) : tensor;
}

/// Brings what a norm sums over into the last dimension: a head, or all heads of a token.
Tensor norm_rows(const Call& call, const Tensor& tensor) {
  if (!call.options.all_heads()) return tensor;
  const Tensor heads = heads_last(call, tensor);  // [.., heads, head_dim]
  c10::SymDimVector sizes(heads.sym_sizes().begin(), heads.sym_sizes().end() - 1);
  sizes.back() *= heads.sym_size(-1);
  return heads.reshape_symint(sizes);
}

/// The inverse of norm_rows(), for rows of the shape of `like`.
Tensor head_rows(const Call& call, const Tensor& rows, const Tensor& like) {
  if (!call.options.all_heads()) return rows;
  const Tensor heads = heads_last(call, like);
  return heads_last(call, rows.reshape_symint(heads.sym_sizes()));
}

dispatcher::Normed normed(const Call& call, const Tensor& tensor) {
  const Tensor rows = norm_rows(call, tensor.to(dispatcher::compute_type(tensor)));
  return dispatcher::norm_chain(rows, call.options.centred(), call.options.eps());
}

/// What multiplies the normalised rows of a tensor that has a weight.
Tensor factor(const Call& call, const Tensor& weight, at::ScalarType type) {
  return at::add(weight.to(type), call.options.weight_offset());
}

Tensor rotate(const Call& call, const Tensor& tensor, bool transpose) {
  if (call.options.cos().has_value()) {
    return rotary_tables::rotary_tables(tensor, {tables_of(call), transpose});
  }
  return rotary::rotary(tensor, rotation_of(call, transpose));
}

/// Whether a call has the roundings of a PyTorch program.
bool is_in_steps(const Call& call) {
  return call.options.cos().has_value() && call.options.numerics() == Numerics::float32;
}

Tensor forward_chain(const Call& call, const Part& part) {
  const at::ScalarType wide = dispatcher::compute_type(part.rows);
  const at::ScalarType narrow = part.rows.scalar_type();
  const bool steps = is_in_steps(call), rounds_first = steps && call.options.round_before_weight();
  Tensor rows = normed(call, part.rows).rows;
  if (rounds_first) rows = rows.to(narrow).to(wide);
  if (part.weight.has_value()) rows = at::mul(rows, factor(call, *part.weight, wide));
  if (part.bias.has_value()) rows = at::add(rows, part.bias->to(wide));
  if (steps) rows = rows.to(narrow);
  return rotate(call, head_rows(call, rows, part.rows), false).to(narrow);
}

Two forward_chain(const Call& call) {
  rotary::check_exact_angles(*rotary::specification(call.spec), "norm_rotary");
  return {forward_chain(call, query_of(call)), forward_chain(call, key_of(call))};
}

/// The gradients of a tensor, its weight and its bias; undefined where there is none.
struct Gradients {
  Tensor rows, weight, bias;
};

Gradients backward_chain(const Call& call, const Part& part, const Tensor& output_gradient) {
  const at::ScalarType wide = dispatcher::compute_type(part.rows);
  const dispatcher::Normed x = normed(call, part.rows);
  Call exact = call;
  exact.options.numerics(Numerics::float32_product);
  Tensor rotated = norm_rows(call, rotate(exact, output_gradient.to(wide), true));
  std::vector<int64_t> all_but_last(static_cast<size_t>(rotated.dim() - 1));
  for (size_t i = 0; i < all_but_last.size(); ++i) all_but_last[i] = static_cast<int64_t>(i);
  Gradients result;
  if (part.bias.has_value()) {
    result.bias = rotated.sum(all_but_last).to(part.bias->scalar_type());
  }
  if (part.weight.has_value()) {
    result.weight = at::mul(rotated, x.rows).sum(all_but_last).to(part.weight->scalar_type());
    rotated = at::mul(rotated, factor(call, *part.weight, wide));
  }
  const Tensor rows = dispatcher::norm_backward_chain(x, call.options.centred(), rotated);
  result.rows = head_rows(call, rows, part.rows).to(part.rows.scalar_type());
  return result;
}

/// For a call that is not general.
Four backward_chain(const Call& call, const Tensor& query_gradient, const Tensor& key_gradient) {
  const auto or_empty = [](const Tensor& gradient, const Tensor& like) {
    return gradient.defined() ? gradient : at::empty({0}, like.options());
  };
  const Gradients query = backward_chain(call, query_of(call), query_gradient);
  const Gradients key = backward_chain(call, key_of(call), key_gradient);
  return {query.rows, key.rows, or_empty(query.weight, query.rows), or_empty(key.weight, key.rows)};
}

bool is_tangent(const Tensor& tensor) { return dispatcher::tangent(tensor).defined(); }

bool is_tangent(const MaybeTensor& tensor) { return tensor.has_value() && is_tangent(*tensor); }

template <typename... Tensors>
bool have_tangent(const Tensors&... tensors) {
  return (is_tangent(tensors) || ...);
}

bool has_tangent(const Call& call) {
  const NormRotaryCall& options = call.options;
  return have_tangent(call.query, call.key, call.query_weight, call.key_weight,
                      options.query_bias(), options.key_bias(), options.cos(), options.sin());
}

/// Whether tables need a gradient, which only the chain has.
bool tables_require_grad(const Call& call) {
  return torch::autograd::compute_requires_grad(call.options.cos(), call.options.sin());
}

// ------------------------------------------------------------------------ by the fused kernels

class NormRotaryBackward : public dispatcher::OperatorNode<NormRotaryBackward> {
 public:
  static constexpr const char* label = "NormRotaryBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    call.members(visit);
    visit(query_rstd);
    visit(key_rstd);
  }

  dispatcher::variable_list backward(dispatcher::variable_list&& gradients) {
    if (!gradients[0].defined() && !gradients[1].defined()) return dispatcher::variable_list(6);
    const Call forward = call.unpack();
    const auto or_zeros = [](const Tensor& gradient, const Tensor& like) {
      return gradient.defined() ? gradient : at::zeros_like(like);
    };
    const Tensor query_gradient = or_zeros(gradients[0], forward.query);
    const Tensor key_gradient = or_zeros(gradients[1], forward.key);
    if (is_general(forward)) {
      const Gradients query = backward_chain(forward, query_of(forward), query_gradient);
      const Gradients key = backward_chain(forward, key_of(forward), key_gradient);
      return {query.rows, key.rows, query.weight, key.weight, query.bias, key.bias};
    }
    auto [query, key, query_weight, key_weight] = norm_rotary_backward(
        query_gradient, key_gradient, query_rstd.unpack(), key_rstd.unpack(), forward);
    if (!forward.query_weight.has_value()) query_weight = Tensor();
    if (!forward.key_weight.has_value()) key_weight = Tensor();
    return {query, key, query_weight, key_weight, Tensor(), Tensor()};
  }

  dispatcher::SavedCall<Call> call;
  dispatcher::SavedVariable query_rstd, key_rstd;  // unless the call is general
};

bool requires_grad(const Call& call) {
  const NormRotaryCall& options = call.options;
  return torch::autograd::compute_requires_grad(call.query, call.key, call.query_weight,
                                                call.key_weight, options.query_bias(),
                                                options.key_bias());
}

auto backward_node(const Call& call) {
  const NormRotaryCall& options = call.options;
  auto node = dispatcher::node_for<NormRotaryBackward>(call.query, call.key, call.query_weight,
                                                       call.key_weight, options.query_bias(),
                                                       options.key_bias());
  if (node) node->call.save(call);
  return node;
}

/// A separate operator also for autograd: an outer torch.func transform differentiates this call.
/// The norms' divisors need no derivatives, because the chain does not use them.
Four forward_autograd(const Call& call) {
  auto node = backward_node(call);
  Four outputs = dispatcher::below_autograd([&] { return norm_rotary_forward(call); });
  auto& [query, key, query_rstd, key_rstd] = outputs;
  if (has_tangent(call)) {
    std::tie(query, key) = forward_chain(call);
  } else if (node) {
    node->query_rstd = dispatcher::save(query_rstd);
    node->key_rstd = dispatcher::save(key_rstd);
    torch::autograd::set_history(query, node);
    torch::autograd::set_history(key, node);
  }
  return outputs;
}

/// A general call, whose backward pass needs only its arguments.
Two general_autograd(const Call& call) {
  if (has_tangent(call) || tables_require_grad(call)) return forward_chain(call);
  auto node = backward_node(call);
  Two outputs = dispatcher::below_autograd([&] { return norm_rotary(call); });
  if (node) {
    torch::autograd::set_history(std::get<0>(outputs), node);
    torch::autograd::set_history(std::get<1>(outputs), node);
  }
  return outputs;
}

Two pair_autograd(const Call& call) {
  if (is_general(call)) return general_autograd(call);
  if (requires_grad(call) || has_tangent(call)) {
    auto [query, key, query_rstd, key_rstd] = forward_autograd(call);
    return {query, key};
  }
  return dispatcher::below_autograd([&] { return norm_rotary(call); });
}

Four backward_autograd(const Tensor& query_gradient, const Tensor& key_gradient,
                       const Tensor& query_rstd, const Tensor& key_rstd, const Call& call) {
  const bool again =
      requires_grad(call) || torch::autograd::compute_requires_grad(query_gradient, key_gradient);
  if (again || has_tangent(call) || have_tangent(query_gradient, key_gradient)) {
    return backward_chain(call, query_gradient, key_gradient);
  }
  return dispatcher::below_autograd([&] {
    return norm_rotary_backward(query_gradient, key_gradient, query_rstd, key_rstd, call);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  norm_rotary.differentiate<pair_autograd>(m);
  norm_rotary_.refuse_gradients(m);
  norm_rotary_forward.differentiate<forward_autograd>(m);
  norm_rotary_backward.differentiate<backward_autograd>(m);
}

}  // namespace posembed::rotary_norm
