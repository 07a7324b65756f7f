// The gradient of rotary frequencies. Turning faster by one radian per position moves a rotated
// pair at right angles to itself, as far as its position is: the gradient of a frequency is the sum
// over tokens of position times the moment of the gradient about the pair. Tokens are summed in
// chunks whose size depends on nothing but their number: same bits for any number of threads.
#pragma once

#include <cstdint>

#include "rotary/kernel.h"

namespace posembed::rotary {

/// Tokens that are summed in one go: enough chunks for every multiprocessor, few enough to add up.
POSEMBED_INLINE int64_t tokens_of_chunk(int64_t tokens) {
  constexpr int64_t least = 16, most_chunks = 512;
  const int64_t size = (tokens + most_chunks - 1) / most_chunks;
  return size < least ? least : size;
}

POSEMBED_INLINE int64_t chunks_of(int64_t tokens) {
  return (tokens + tokens_of_chunk(tokens) - 1) / tokens_of_chunk(tokens);
}

/// A frequency's sum over all chunks of sums [chunks, pairs].
POSEMBED_INLINE double total_of(const double* sums, int64_t chunks, int64_t pairs, int64_t pair) {
  double total = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) total += sums[chunk * pairs + pair];
  return total;
}

/// sums[chunk, pair] for chunks [begin, end): over tokens and heads, position * (g1 x0 - g0 x1).
/// `arguments.rows[0]` is x, what was rotated; rows[1] is g, the gradient of x; nothing is written
/// to either.
POSEMBED_CPU_KERNEL(sum_moments,
                    void(const Arguments& arguments, double* sums, int64_t begin, int64_t end));

/// The same for all chunks, and their total, to float32 or float64 `out` [pairs].
const char* sum_moments_cuda(const Arguments& arguments, double* sums, void* out,
                             core::Scalar scalar, core::CudaStream stream);

}  // namespace posembed::rotary
