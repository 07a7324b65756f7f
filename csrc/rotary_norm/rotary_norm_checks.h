// Turns the weights and biases of norms into the kernels' arguments, for all operators that
// normalise query and key; the backward pass into given memory.
#pragma once

#include "rotary/rotary_checks.h"
#include "rotary_norm/rotary_norm.h"
#include "rotary_norm/rotary_norm_operator.h"

namespace posembed::rotary_norm {

/// The first parameter that is given; nullptr: none is.
const Tensor* any_parameter(const Call& call);

/// The checks of weights, biases and the norm's numbers, which need no values.
void check_parameters(const Call& call);

/// Contiguous weights and biases, which the kernel's arguments point to.
struct Parameters {
  Tensor tensor[4];
};

/// Sets the norm in arguments that have the rotation.
void set_norm(const Call& call, Parameters* parameters, Arguments* arguments);

/// Whether an argument has a tangent.
bool has_tangent(const Call& call);

/// Weights and biases as autocast gives them.
Call with_weights_like_data(Call call);

/// The gradients of query and key, and the rstd of both.
struct Saved {
  const Tensor &query_gradient, &key_gradient, &query_rstd, &key_rstd;
};

/// The checks of norm_rotary_backward.
rotary::SpecificationPointer check_backward(const Saved& saved, const Call& call);

/// Memory for the gradient of a weight, empty if there is none.
Tensor empty_gradient(const MaybeTensor& weight, const Call& call);

/// Writes the gradients of query, key and weights.
void write_gradients(const Saved& saved, const Call& call, const Four& results);

}  // namespace posembed::rotary_norm
