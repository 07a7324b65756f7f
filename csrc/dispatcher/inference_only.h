// The Autograd kernel of all operators that write to their arguments, in place or as `out`.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/KernelFunction.h>

#include <string>

namespace posembed::dispatcher {

/// Throws c10::ValueError if `tensor` requires a gradient or has a tangent, which an operator
/// without history would lose. `alternative`: the operator that keeps it.
void check_inference_only(const at::Tensor& tensor, const std::string& argument,
                          const std::string& alternative);

/// Checks every tensor so, calls the operator below autograd, and increments the version of every
/// tensor that its schema marks as written. posembed::f_ and posembed::f_out refer to posembed::f.
void inference_only(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace posembed::dispatcher
