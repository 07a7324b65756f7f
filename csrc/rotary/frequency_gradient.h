// The gradient of rotary frequencies. A rotated pair y = (y0, y1) moves by position * (-y1, y0) per
// radian of frequency, so a frequency's gradient is the sum over tokens of position times the
// moment g1 y0 - g0 y1. Tokens are summed in chunks whose size depends only on their number: the
// same bits for any number of threads.
#pragma once

#include <cstdint>

#include "rotary/kernel.h"

namespace posembed::rotary {

/// Tokens of a chunk: small enough that every multiprocessor has one, large enough to add few sums.
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
