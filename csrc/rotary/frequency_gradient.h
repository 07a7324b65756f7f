// The gradient of rotary frequencies. A rotated pair y = (y0, y1) has the derivative position *
// (-y1, y0) by its frequency, so a frequency's gradient is the sum over tokens of position times
// the moment g1 y0 - g0 y1. Tokens are summed in chunks whose size depends only on the number of
// tokens, so any number of threads gives the same bits.
#pragma once

#include <cstdint>

#include "rotary/kernel.h"

namespace posembed::rotary {

/// The number of tokens in a chunk: small enough that every multiprocessor has a chunk, large
/// enough that few sums remain to be added.
POSEMBED_INLINE int64_t tokens_of_chunk(int64_t tokens) {
  constexpr int64_t min_size = 16, max_chunks = 384;
  const int64_t size = (tokens + max_chunks - 1) / max_chunks;
  return size < min_size ? min_size : size;
}

POSEMBED_INLINE int64_t chunks_of(int64_t tokens) {
  return (tokens + tokens_of_chunk(tokens) - 1) / tokens_of_chunk(tokens);
}

/// The number of frequencies: [pairs], [heads, pairs] or [axes, heads, pairs].
POSEMBED_INLINE int64_t frequency_count(const Arguments& arguments) {
  const int64_t heads = is_by_head(arguments) ? arguments.views[0].heads : 1;
  return mixed_axes(arguments) * heads * arguments.pairs;
}

/// A frequency's total over all chunks of sums [chunks, pairs].
POSEMBED_INLINE double total_of(const double* sums, int64_t chunks, int64_t pairs, int64_t pair) {
  double total = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) total += sums[chunk * pairs + pair];
  return total;
}

/// sums[chunk, frequency] for chunks [begin, end): over tokens and heads, position * (g1 x0 - g0
/// x1). `arguments.views[0]` is x, the rotated tensor, and views[1] is g, the gradient of x;
/// neither is written.
POSEMBED_CPU_KERNEL(sum_moments,
                    void(const Arguments& arguments, double* sums, int64_t begin, int64_t end));

/// The same for all chunks; writes their total to float32 or float64 `out`,
/// which has an element for each frequency.
const char* sum_moments_cuda(const Arguments& arguments, double* sums, void* out,
                             core::Scalar scalar, core::CudaStream stream);

}  // namespace posembed::rotary
