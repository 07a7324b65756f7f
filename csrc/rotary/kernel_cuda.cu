// Rotary embedding on CUDA. A block rotates some or all heads of one token: its sines and cosines
// are computed once, in shared memory, without a table. A thread owns both members of its pairs, so
// that every element is read and written once and rotating in place is safe.
#include "rotary/kernel_cuda.h"

namespace posembed::rotary {
namespace {

template <typename T, int size, bool interleaved, int capacity>
__global__ void __launch_bounds__(size > 1 ? threads_wanted : int{max_pairs})
    rotate_kernel(const __grid_constant__ Launch<T, capacity> launch) {
  using Owned = Pairs<T, size, interleaved>;
  __shared__ Compute<T> sines[capacity], cosines[capacity];
  const int owners = max(1, launch.pairs / size);  // threads that share a head
  const int owner = threadIdx.x % owners, first_head = threadIdx.x / owners;
  const int first_place = owner * size * (interleaved ? 2 : 1);
  const int second_place = first_place + (interleaved ? size : launch.pairs);

  const int64_t blocks_of_token = launch.splits;
  const int split = static_cast<int>(blockIdx.x % blocks_of_token);
  const int begin = launch.heads * split / launch.splits;
  const int end = launch.heads * (split + 1) / launch.splits;

  for (int64_t number = blockIdx.x / blocks_of_token; number < launch.tokens;
       number += gridDim.x / blocks_of_token) {
    const Token token = token_of(launch, number);
    Owned owned[heads_in_flight];
    const auto read_heads = [&](int head) {
#pragma unroll
      for (int i = 0; i < heads_in_flight; ++i, head += launch.heads_per_pass) {
        if (head >= end) break;
        const Row<T> row = row_of(launch, token, head);
        owned[i].first = Pack<T, size>::read(row.in + first_place);
        owned[i].second = Pack<T, size>::read(row.in + second_place);
      }
    };
    // The first rows are on their way before the position is known.
    int head = launch.pairs > 0 ? begin + first_head : end;
    read_heads(head);

    const bool rotated = begin_token(launch, token, sines, cosines);
    const Angles<T, size> angles = angles_of<T, size>(owner, sines, cosines);

    while (head < end) {
#pragma unroll
      for (int i = 0; i < heads_in_flight; ++i, head += launch.heads_per_pass) {
        if (head >= end) break;
        if (rotated) owned[i].rotate(angles);
        const Row<T> row = row_of(launch, token, head);
        if (!rotated && row.in == row.out) continue;
        owned[i].first.write(row.out + first_place);
        owned[i].second.write(row.out + second_place);
      }
      read_heads(head);
    }
    copy_outside<T, capacity, size>(launch, token, 0, begin, min(end, launch.query_heads));
    copy_outside<T, capacity, size>(launch, token, 1, max(begin, launch.query_heads), end);
  }
}

template <typename T, int size, bool interleaved, int capacity>
const char* launch_kernel(const Arguments& arguments, core::CudaStream stream) {
  Launch<T, capacity> launch = make_launch<T, capacity>(arguments);
  if (launch.tokens == 0 || launch.heads == 0) return nullptr;
  const cudaLaunchConfig_t config = share_heads(&launch, size, stream);
  const cudaError_t error =
      cudaLaunchKernelEx(&config, rotate_kernel<T, size, interleaved, capacity>, launch);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <typename T, int size, bool interleaved>
const char* launch_capacity(const Arguments& arguments, core::CudaStream stream) {
  // Most models have at most 64 pairs; a small launch is quicker to hand over.
  return arguments.pairs <= 64 ? launch_kernel<T, size, interleaved, 64>(arguments, stream)
                               : launch_kernel<T, size, interleaved, max_pairs>(arguments, stream);
}

template <typename T, int size>
const char* launch_pairing(const Arguments& arguments, core::CudaStream stream) {
  return arguments.interleaved ? launch_capacity<T, size, true>(arguments, stream)
                               : launch_capacity<T, size, false>(arguments, stream);
}

}  // namespace

const char* rotate_cuda(const Arguments& arguments, core::CudaStream stream) {
  return core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return can_use_vectors<T>(arguments)
               ? launch_pairing<T, vector_bytes / sizeof(T)>(arguments, stream)
               : launch_pairing<T, 1>(arguments, stream);
  });
}

}  // namespace posembed::rotary
