// Operators that write to their arguments, in place or as `out`, keep no history of gradients.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

namespace posembed::dispatcher {

/// Whether an operator without history would lose a gradient or a tangent of `tensor`.
inline bool has_history(const at::Tensor& tensor) {
  return (at::GradMode::is_enabled() && tensor.requires_grad()) ||
         tensor._fw_grad(/*level=*/0).defined();
}

/// Throws c10::ValueError if it would. `alternative`: the operator that keeps it.
void check_inference_only(const at::Tensor& tensor, const char* argument, const char* alternative);

/// Throws c10::ValueError for a tensor of inference mode that is written outside of it, which torch
/// refuses only after the write.
void check_versioned(const at::Tensor& tensor, const char* argument);

}  // namespace posembed::dispatcher
