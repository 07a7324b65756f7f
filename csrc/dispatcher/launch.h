// Runs a kernel on its tensors' device: on CUDA, or on the CPU's threads.
#pragma once

#include "dispatcher/cuda_scope.h"
#include "dispatcher/parallel.h"

// Wraps a CUDA launcher as an argument of launch(). Use its name only inside `if constexpr`,
// because it does not exist without CUDA.
#define POSEMBED_CUDA_LAUNCHER(launcher)                                                 \
  [](const auto& arguments, ::posembed::core::CudaStream stream) -> const char* {        \
    if constexpr (::posembed::core::built_with_cuda) return launcher(arguments, stream); \
    return nullptr;                                                                      \
  }

namespace posembed::dispatcher {

/// Calls `cuda` on the current stream of `tensor`'s device, or `cpu` for all `count` items.
template <typename Arguments, typename Cpu, typename Cuda>
void launch(const Arguments& arguments, const at::Tensor& tensor, int64_t count,
            int64_t bytes_per_item, const Cpu& cpu, [[maybe_unused]] const Cuda& cuda) {
  if (on_cuda(tensor)) {
    if constexpr (core::built_with_cuda) {
      const CudaScope scope(tensor);
      check_launch(cuda(arguments, scope.stream()));
    }
    return;
  }
  parallel_for(count, bytes_per_item,
               [&](int64_t begin, int64_t end) { cpu(arguments, begin, end); });
}

}  // namespace posembed::dispatcher
