// Tensors as kernels read them: element types, integers, rows.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>

#include "core/index.h"
#include "core/position.h"
#include "core/scalar.h"

namespace posembed::dispatcher {

/// "int64" for at::kLong: the name under which Python has a dtype.
inline std::string dtype_name(at::ScalarType type) {
  return std::string(c10::getDtypeNames(type).first);
}

/// The kernel's type for a dtype that check_floating() accepts.
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

/// The dtype of arithmetic on `tensor`: float64 for float64, float32 for everything else.
inline at::ScalarType compute_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

/// The kernel's view of a tensor that check_integers() accepts.
inline core::IndexView index_view(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(),
          tensor.scalar_type() == at::kInt ? core::Index::int32 : core::Index::int64};
}

/// The kernel's view of positions in int32, int64 or a floating type.
inline core::PositionView position_view(const at::Tensor& positions) {
  core::PositionView view;
  view.data = positions.const_data_ptr();
  view.floating = positions.is_floating_point();
  if (view.floating) {
    view.scalar = scalar_of(positions);
  } else {
    view.index = index_view(positions).type;
  }
  return view;
}

/// The sizes of `tensor`, and one more.
inline c10::SymDimVector sizes_and(const at::Tensor& tensor, c10::SymInt last) {
  c10::SymDimVector sizes(tensor.sym_sizes().begin(), tensor.sym_sizes().end());
  sizes.push_back(std::move(last));
  return sizes;
}

/// Whether the last dimension is contiguous, as kernels require. Strides of a tensor without
/// elements do not matter: numpy sets all of them to 0.
inline bool last_dim_contiguous(const at::Tensor& tensor) {
  return tensor.sym_stride(-1) == 1 || tensor.sym_size(-1) <= 1 || tensor.sym_numel() == 0;
}

/// `tensor`, copied if its last dimension is not contiguous.
inline at::Tensor with_contiguous_last_dim(const at::Tensor& tensor) {
  return last_dim_contiguous(tensor) ? tensor : tensor.contiguous();
}

}  // namespace posembed::dispatcher
