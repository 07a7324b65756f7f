// LayerNorm and RMSNorm over the last dimension, without weight and bias, as chains of operators
// that have derivatives of every order.
#pragma once

#include <ATen/ops/add.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/square.h>
#include <ATen/ops/sub.h>

namespace posembed::dispatcher {

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
