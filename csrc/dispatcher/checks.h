// Argument checks of all operators, run by eager and Meta kernels alike. A message names the
// argument, what was expected and what was given: ValueError for shapes, options and layouts,
// TypeError for dtypes, IndexError for ids and positions.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include "dispatcher/tensors.h"

namespace posembed::dispatcher {

/// float32, float64, bfloat16 or float16.
inline void check_floating(at::ScalarType type, const char* argument) {
  TORCH_CHECK_TYPE(
      type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf,
      argument, ": expected float32, float64, bfloat16 or float16, got ", type);
}

inline void check_floating(const at::Tensor& tensor, const char* argument) {
  check_floating(tensor.scalar_type(), argument);
}

/// int32 or int64.
inline void check_integers(const at::Tensor& tensor, const char* argument) {
  const at::ScalarType type = tensor.scalar_type();
  TORCH_CHECK_TYPE(type == at::kInt || type == at::kLong, argument,
                   ": expected int32 or int64, got ", type);
}

inline void check_same_dtype(const at::Tensor& tensor, const char* argument,
                             const at::Tensor& other, const char* other_argument) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == other.scalar_type(), argument,
                   ": expected the dtype of ", other_argument, ", ", other.scalar_type(), ", got ",
                   tensor.scalar_type());
}

inline void check_same_device(const at::Tensor& tensor, const char* argument,
                              const at::Tensor& other, const char* other_argument) {
  TORCH_CHECK_VALUE(tensor.device() == other.device(), argument, ": expected the device of ",
                    other_argument, ", ", other.device(), ", got ", tensor.device());
}

inline void check_rank(const at::Tensor& tensor, const char* argument, int64_t rank,
                       const char* shape) {
  TORCH_CHECK_VALUE(tensor.dim() == rank, argument, ": expected ", shape, ", got ",
                    tensor.sym_sizes());
}

inline void check_size(const c10::SymInt& size, const c10::SymInt& expected, const char* argument,
                       const char* dimension) {
  TORCH_CHECK_VALUE(size == expected, argument, ": expected ", dimension, " ", expected, ", got ",
                    size);
}

/// Memory that a kernel is to write: kernels ask for a contiguous last dimension.
inline void check_dense_rows(const at::Tensor& tensor, const char* argument) {
  TORCH_CHECK_VALUE(has_dense_rows(tensor), argument,
                    ": expected a contiguous last dimension, got strides ", tensor.strides());
}

/// Throws if an argument that is written in place requires a gradient or has a tangent.
inline void check_inference_only(const at::Tensor& tensor, const char* argument,
                                 const char* alternative) {
  TORCH_CHECK_VALUE(!(at::GradMode::is_enabled() && tensor.requires_grad()), argument,
                    ": requires grad, and an in-place operator keeps no history; use ", alternative,
                    " or torch.no_grad()");
  TORCH_CHECK_VALUE(!tensor._fw_grad(/*level=*/0).defined(), argument,
                    ": has a forward-mode tangent, which an in-place operator would not change; ",
                    "use ", alternative);
}

}  // namespace posembed::dispatcher
