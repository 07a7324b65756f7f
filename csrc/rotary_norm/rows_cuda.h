// Rows of QK-norm in the registers of threads that share a head, and their sums. Included only by
// kernel_cuda.cu files; everything is internal to each.
#pragma once

#include "rotary/kernel_cuda.h"
#include "rotary_norm/kernel.h"

namespace posembed::rotary_norm {
namespace {

using core::Compute;
using rotary::HeadThreads;
using rotary::HeadView;
using rotary::Launch;
using rotary::Pack;
using rotary::Token;

template <typename T, int size>
__device__ Pack<Compute<T>, size> widen(const Pack<T, size>& narrow) {
  Pack<Compute<T>, size> wide;
  core::load_all(narrow.element, wide.element);
  return wide;
}

template <typename T, int size>
__device__ Pack<Compute<T>, size> load_wide(const T* in) {
  return widen(Pack<T, size>::read(in));
}

/// Weights or biases in the compute type; `W` is the type in memory.
template <typename T, typename W, int size>
__device__ Pack<Compute<T>, size> load_parameters(const void* data, int64_t column) {
  const W* const in = static_cast<const W*>(data) + column;
  if constexpr (std::is_same_v<W, T>) {
    return load_wide<T, size>(in);
  } else {
    Pack<Compute<T>, size> pack;
    core::load_values<size>(in, pack.element);
    return pack;
  }
}

template <typename T, int size>
__device__ Pack<T, size> narrow(const Pack<Compute<T>, size>& wide) {
  Pack<T, size> pack;
#pragma unroll
  for (int i = 0; i < size; ++i) core::store(wide.element[i], pack.element + i);
  return pack;
}

/// Adds the products of the elements of a and b to `sum`.
template <typename C, int size>
__device__ C dot(const Pack<C, size>& a, const Pack<C, size>& b, C sum) {
#pragma unroll
  for (int i = 0; i < size; ++i) sum = core::fma(a.element[i], b.element[i], sum);
  return sum;
}

template <typename C, int size>
__device__ void multiply(C factor, Pack<C, size>* pack) {
#pragma unroll
  for (int i = 0; i < size; ++i) pack->element[i] *= factor;
}

template <typename C, int size>
__device__ void multiply(const Pack<C, size>& factor, Pack<C, size>* pack) {
#pragma unroll
  for (int i = 0; i < size; ++i) pack->element[i] *= factor.element[i];
}

/// Calls function(column) for this thread's packs of a row outside the window.
template <int size, typename T, int capacity, typename Function>
__device__ void for_outside(const Launch<T, capacity>& launch, const HeadThreads& threads,
                            const Function& function) {
  const int before = launch.start[0] / size, window = 2 * launch.pairs / size;
  const int packs = launch.outside[0] / size;
  for (int i = threads.index; i < packs; i += threads.count) {
    function((i < before ? i : i + window) * size);
  }
}

/// The sum of `value` over the threads that share a head, in a fixed order. All threads of the
/// block must call it, and never twice in a row with the same `buffer`.
template <typename C>
__device__ C head_sum(const HeadThreads& threads, C value, bool buffer) {
  if (threads.within_warp) {
    for (int offset = threads.count / 2; offset > 0; offset /= 2) {
      value += __shfl_xor_sync(0xffffffffu, value, offset);
    }
    return value;
  }
  __shared__ C values[2][rotary::max_pairs];
  values[buffer][threadIdx.x] = value;
  __syncthreads();
  C sum = 0;
  for (int i = 0; i < threads.count; ++i) sum += values[buffer][threads.group * threads.count + i];
  return sum;
}

/// head_sum() for blocks that have whole warps, and threads without a head.
template <typename T, int capacity, typename C>
__device__ C group_sum(const Launch<T, capacity>& launch, const HeadThreads& threads, C value,
                       bool buffer) {
  if (threads.within_warp) return head_sum(threads, value, buffer);
  __shared__ C values[2][rotary::max_pairs];
  values[buffer][threadIdx.x] = value;
  __syncthreads();
  C sum = 0;
  if (threads.group >= launch.heads_per_pass) return sum;
  for (int i = 0; i < threads.count; ++i) sum += values[buffer][threads.group * threads.count + i];
  return sum;
}

/// The tensor and index of a head.
struct Head {
  int r;           // 0: query, 1: key
  int64_t number;  // among the heads of query or key
  int64_t rstd_index;

  template <typename T, int capacity>
  __device__ Head(const Launch<T, capacity>& launch, const Token& token, int head)
      : r(head >= launch.query_heads),
        number(r == 0 ? head : head - launch.query_heads),
        rstd_index(token.number * launch.views[r].heads + number) {}
};

}  // namespace
}  // namespace posembed::rotary_norm
