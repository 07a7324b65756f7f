// Forward-mode derivatives, and Autograd kernels of linear operators, whose gradients and tangents
// are operator calls too.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/square.h>
#include <ATen/ops/sub.h>
#include <torch/csrc/autograd/functions/utils.h>

namespace posembed::dispatcher {

/// The forward-mode tangent of `tensor`; undefined if it has none.
inline at::Tensor tangent(const at::Tensor& tensor) {
  return tensor.defined() ? at::Tensor(tensor._fw_grad(/*level=*/0)) : at::Tensor();
}

/// A copy of the tangent, for an output whose tangent is that of `tensor`.
inline at::Tensor copied_tangent(const at::Tensor& tensor) {
  const at::Tensor direction = tangent(tensor);
  return direction.defined() ? direction.clone() : direction;
}

inline void set_tangent(const at::Tensor& output, const at::Tensor& value) {
  if (value.defined()) output._set_fw_grad(value, /*level=*/0, /*is_inplace_op=*/false);
}

/// `tensor` without its tangent. Operators that compute a tangent take primals, because otherwise
/// they would differentiate again.
inline at::Tensor primal(const at::Tensor& tensor) {
  return tangent(tensor).defined() ? tensor._fw_primal(/*level=*/0) : tensor;
}

/// a + b, where either may be undefined.
inline at::Tensor accumulate(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined()) return b;
  return b.defined() ? a.add(b) : a;
}

/// Calls `function` with autograd's dispatch keys excluded. An operator's Autograd kernel calls the
/// operator itself this way.
template <typename Function>
auto below_autograd(const Function& function) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return function();
}

/// The Autograd kernel of an operator that is linear in `input`: `function` calls the operator with
/// a tensor in its place.
template <typename Node, typename Function>
at::Tensor linear(const Node& node, const at::Tensor& input, const Function& function) {
  at::Tensor output = below_autograd([&] { return function(input); });
  if (node) torch::autograd::set_history(output, node);
  if (const at::Tensor direction = tangent(input); direction.defined()) {
    set_tangent(output, function(direction));
  }
  return output;
}

/// The same for an operator that is linear in each of two inputs, of which one may be undefined.
template <typename Node, typename Function>
at::Tensor bilinear(const Node& node, const at::Tensor& a, const at::Tensor& b,
                    const Function& function) {
  at::Tensor output = below_autograd([&] { return function(a, b); });
  if (node) torch::autograd::set_history(output, node);
  at::Tensor direction;
  if (const at::Tensor tangent_of_a = tangent(a); tangent_of_a.defined())
    direction = function(tangent_of_a, primal(b));
  if (const at::Tensor tangent_of_b = tangent(b); tangent_of_b.defined()) {
    direction = accumulate(direction, function(primal(a), tangent_of_b));
  }
  set_tangent(output, direction);
  return output;
}

// -------------------------------------------------------------------------------------- norm chain
// LayerNorm and RMSNorm over the last dimension, without weight and bias, as chains of operators
// that have derivatives of every order.

struct Normed {
  at::Tensor rows, rstd;
};

/// @param centred  true for LayerNorm, which subtracts the mean
inline Normed norm_chain(const at::Tensor& x, bool centred, double eps) {
  const at::Tensor rows = centred ? at::sub(x, x.mean(-1, true)) : x;
  const at::Tensor rstd = at::rsqrt(at::add(at::square(rows).mean(-1, true), eps));
  return {at::mul(rows, rstd), rstd};
}

/// The gradient of x, from the gradient of the normalised rows.
inline at::Tensor norm_backward_chain(const Normed& x, bool centred, const at::Tensor& gradient) {
  const at::Tensor projection = at::mul(gradient, x.rows).mean(-1, true);
  at::Tensor rest = at::sub(gradient, at::mul(x.rows, projection));
  if (centred) rest = at::sub(rest, gradient.mean(-1, true));
  return at::mul(rest, x.rstd);
}

}  // namespace posembed::dispatcher
