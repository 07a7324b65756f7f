#include "dispatcher/host_floats.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "core/host_floats.h"
#include "dispatcher/cuda_scope.h"

namespace posembed::dispatcher {

at::Tensor floats_on(c10::Device device, at::ArrayRef<float> values, at::IntArrayRef sizes) {
  at::Tensor out = at::empty(sizes, at::TensorOptions(at::kFloat).device(device));
  if (out.is_meta()) return out;
  if constexpr (core::built_with_cuda) {
    if (on_cuda(out)) {
      const CudaScope scope(out);
      check_launch(core::write_floats_cuda(values.data(), out.numel(),
                                           out.mutable_data_ptr<float>(), scope.stream()));
      return out;
    }
  }
  at::Tensor host = out.is_cpu() ? out : at::empty(sizes, at::kFloat);
  std::copy(values.begin(), values.end(), host.mutable_data_ptr<float>());
  return host.to(device);
}

}  // namespace posembed::dispatcher
