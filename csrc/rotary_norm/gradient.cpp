// Derivatives of the QK-norm operators. The usual backward pass is one kernel. Second derivatives
// and tangents use the same formulas as a chain of differentiable operators.
#include <ATen/ops/add.h>
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

namespace posembed::rotary_norm {
namespace {

// -------------------------------------------------------------------- as a chain of operators

dispatcher::Normed normed(const Call& call, const Tensor& tensor) {
  return dispatcher::norm_chain(tensor.to(dispatcher::compute_type(tensor)), false,
                                call.options.eps());
}

Tensor factor(const Call& call, const Tensor& weight) {
  return at::add(weight.to(dispatcher::compute_type(weight)), call.options.weight_offset());
}

Tensor rotate(const Call& call, const Tensor& tensor, bool transpose) {
  return rotary::rotary(tensor, rotation_of(call, transpose));
}

Tensor forward_chain(const Call& call, const Tensor& tensor, const Tensor& weight) {
  const Tensor rows = at::mul(normed(call, tensor).rows, factor(call, weight));
  return rotate(call, rows, false).to(tensor.scalar_type());
}

Two forward_chain(const Call& call) {
  rotary::check_exact_angles(*rotary::specification(call.spec), "norm_rotary");
  return {forward_chain(call, call.query, call.query_weight),
          forward_chain(call, call.key, call.key_weight)};
}

/// Gradients of a tensor and its weight.
Two backward_chain(const Call& call, const Tensor& tensor, const Tensor& weight,
                   const Tensor& output_gradient) {
  const dispatcher::Normed x = normed(call, tensor);
  const Tensor rotated = rotate(call, output_gradient.to(dispatcher::compute_type(tensor)), true);
  std::vector<int64_t> all_but_last(static_cast<size_t>(tensor.dim() - 1));
  for (size_t i = 0; i < all_but_last.size(); ++i) all_but_last[i] = static_cast<int64_t>(i);
  const Tensor weight_gradient = at::mul(rotated, x.rows).sum(all_but_last);
  const Tensor result =
      dispatcher::norm_backward_chain(x, false, at::mul(rotated, factor(call, weight)));
  return {result.to(tensor.scalar_type()), weight_gradient.to(tensor.scalar_type())};
}

Four backward_chain(const Call& call, const Tensor& query_gradient, const Tensor& key_gradient) {
  auto [query, query_weight] = backward_chain(call, call.query, call.query_weight, query_gradient);
  auto [key, key_weight] = backward_chain(call, call.key, call.key_weight, key_gradient);
  return {query, key, query_weight, key_weight};
}

template <typename... Tensors>
bool have_tangent(const Tensors&... tensors) {
  return (dispatcher::tangent(tensors).defined() || ...);
}

bool has_tangent(const Call& call) {
  return have_tangent(call.query, call.key, call.query_weight, call.key_weight);
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
    if (!gradients[0].defined() && !gradients[1].defined()) return dispatcher::variable_list(4);
    const Call forward = call.unpack();
    const auto or_zeros = [](const Tensor& gradient, const Tensor& like) {
      return gradient.defined() ? gradient : at::zeros_like(like);
    };
    auto [query_gradient, key_gradient, query_weight_gradient, key_weight_gradient] =
        norm_rotary_backward(or_zeros(gradients[0], forward.query),
                             or_zeros(gradients[1], forward.key), query_rstd.unpack(),
                             key_rstd.unpack(), forward);
    return {query_gradient, key_gradient, query_weight_gradient, key_weight_gradient};
  }

  dispatcher::SavedCall<Call> call;
  dispatcher::SavedVariable query_rstd, key_rstd;
};

bool requires_grad(const Call& call) {
  return torch::autograd::compute_requires_grad(call.query, call.key, call.query_weight,
                                                call.key_weight);
}

/// A separate operator also for autograd: an outer torch.func transform differentiates this call.
/// The norms' divisors need no derivatives, because the chain does not use them.
Four forward_autograd(const Call& call) {
  auto node = dispatcher::node_for<NormRotaryBackward>(call.query, call.key, call.query_weight,
                                                       call.key_weight);
  Four outputs = dispatcher::below_autograd([&] { return norm_rotary_forward(call); });
  auto& [query, key, query_rstd, key_rstd] = outputs;
  if (has_tangent(call)) {
    std::tie(query, key) = forward_chain(call);
  } else if (node) {
    node->call.save(call);
    node->query_rstd = dispatcher::save(query_rstd);
    node->key_rstd = dispatcher::save(key_rstd);
    torch::autograd::set_history(query, node);
    torch::autograd::set_history(key, node);
  }
  return outputs;
}

Two pair_autograd(const Call& call) {
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
