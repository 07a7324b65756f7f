// Argument checks of all operators, run by eager and Meta kernels alike, so that both fail in the
// same words: the argument, what was expected, what came. ValueError for shapes, options and
// layouts, TypeError for dtypes, IndexError for ids and positions.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include "core/index.h"
#include "core/scalar.h"

namespace posembed::dispatcher {

/// float32, float64, bfloat16 or float16.
inline void check_floating(const at::Tensor& tensor, const char* argument) {
  const at::ScalarType type = tensor.scalar_type();
  TORCH_CHECK_TYPE(
      type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf,
      argument, ": expected float32, float64, bfloat16 or float16, got ", type);
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

/// A mutable operator's argument: neither a leaf nor part of a graph may be overwritten.
inline void check_inference_only(const at::Tensor& tensor, const char* argument,
                                 const char* alternative) {
  TORCH_CHECK_VALUE(!(at::GradMode::is_enabled() && tensor.requires_grad()), argument,
                    ": requires grad, and an in-place operator keeps no history; use ", alternative,
                    " or torch.no_grad()");
  TORCH_CHECK_VALUE(!tensor._fw_grad(/*level=*/0).defined(), argument,
                    ": has a forward-mode tangent, which an in-place operator would not change; ",
                    "use ", alternative);
}

/// The kernel's name of a dtype that check_floating() has let through.
inline core::Scalar scalar_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return core::Scalar::float64;
    case at::kBFloat16:
      return core::Scalar::bfloat16;
    case at::kHalf:
      return core::Scalar::float16;
    default:
      return core::Scalar::float32;
  }
}

/// The kernel's view of a tensor that check_integers() has let through.
inline core::IndexView index_view(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(),
          tensor.scalar_type() == at::kInt ? core::Index::int32 : core::Index::int64};
}

}  // namespace posembed::dispatcher
