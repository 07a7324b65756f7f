// Fourier features on CUDA: a thread has one frequency of each term and computes its angles of a
// few items, so that turns are found once for all of them.
#include <algorithm>

#include "core/device_vector.h"
#include "core/divisor.h"
#include "fourier/fourier.h"

namespace posembed::fourier {
namespace {

using core::Compute;

constexpr int block_size = 256;
constexpr int items_of_thread = 8;
constexpr int64_t max_blocks = int64_t{1} << 20;

/// A coordinate times turns.
template <bool wide>
__device__ uint64_t product(const Coordinate& coordinate, const Turns& turns) {
  uint64_t sum = 0;
  for (const Limb& limb : coordinate.limbs) {
    const int word = highest_word(limb);
    if (limb.factor == 0 || word >= words) continue;
    sum +=
        angle<wide>(limb, word_of(turns, word), word_of(turns, word - 1), word_of(turns, word - 2));
  }
  return sum;
}

/// Thread number part * count + index computes angle `index` of the items of a part.
template <typename T>
__global__ void __launch_bounds__(block_size)
    encode_kernel(Arguments a, core::Divisor<int64_t> count, int64_t items, int64_t threads) {
  using C = Compute<T>;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t t = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; t < threads; t += step) {
    const auto place = core::divide(t, count);
    const int64_t index = place.remainder, first = place.quotient * items_of_thread;
    const Start start = start_of(a, index);
    uint64_t angles[items_of_thread];
    float factors[items_of_thread];
    for (int i = 0; i < items_of_thread; ++i) {
      angles[i] = start.turns;
      factors[i] = start.factor;
    }
    for (int64_t term = 0; term < a.terms; ++term) {
      const Turns turns = turns_at(a, term, index);
#pragma unroll
      for (int i = 0; i < items_of_thread; ++i) {
        if (first + i >= items) break;
        const Coordinate coordinate = coordinate_at(a, first + i, term);
        if (!turns.valid || !coordinate.valid) factors[i] = NAN;
        angles[i] += product<std::is_same_v<C, double>>(coordinate, turns);
      }
    }
#pragma unroll
    for (int i = 0; i < items_of_thread; ++i) {
      if (first + i >= items) break;
      C sine, cosine;
      sincos(angles[i], &sine, &cosine);
      const int64_t column = first_column(a, first + i) + index * a.count_step;
      if (a.sine >= 0) put<T>(a, sine * factors[i], column + a.sine);
      if (a.cosine >= 0) put<T>(a, cosine * factors[i], column + a.cosine);
    }
  }
}

}  // namespace

const char* encode_cuda(const Arguments& a, core::CudaStream stream) {
  const int64_t items = a.rows * a.groups;
  const int64_t threads = core::divide_up(items, int64_t{items_of_thread}) * a.count;
  const int64_t blocks = std::min(core::divide_up(threads, int64_t{block_size}), max_blocks);
  if (blocks == 0) return nullptr;
  core::visit_scalar(a.scalar, [&](auto tag) {
    core::launch(encode_kernel<typename decltype(tag)::type>, blocks, block_size, stream, a,
                 core::Divisor<int64_t>::of(a.count), items, threads);
  });
  return core::launch_error();
}

}  // namespace posembed::fourier
