// The check of floating positions on the CPU; a CUDA kernel writes NaN for them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cmath>

namespace posembed::dispatcher {

/// Raises IndexError for the first of floating positions on the CPU that is NaN or infinite.
inline void check_finite(const at::Tensor& positions, const char* argument) {
  const auto check = [&](const at::Tensor& dense, const auto* values) {
    for (int64_t i = 0; i < dense.numel(); ++i) {
      TORCH_CHECK_INDEX(std::isfinite(values[i]), argument, ": expected finite positions, got ",
                        values[i], " at index ", i);
    }
  };
  if (!positions.is_cpu()) return;
  const at::Tensor dense = positions.contiguous();
  if (dense.scalar_type() == at::kDouble) check(dense, dense.const_data_ptr<double>());
  if (dense.scalar_type() == at::kFloat) check(dense, dense.const_data_ptr<float>());
}

}  // namespace posembed::dispatcher
