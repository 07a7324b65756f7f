// Turns the weights and biases of norms into the kernels' arguments, for all operators that
// normalise query and key.
#pragma once

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

}  // namespace posembed::rotary_norm
