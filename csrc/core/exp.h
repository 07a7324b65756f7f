// exp for softmax, in float32 with an error below 2 ulp. CPU vectors, scalars and CUDA share one
// formula and give the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/fma.h"
#include "core/macros.h"
#if defined(POSEMBED_ISA)
#include "core/vector.h"
#endif

namespace posembed::core {

/// e^x for x <= 0; 0 below -87.3, where results would be denormal. NaN stays NaN. `V` is float or a
/// vector of floats that has an fma; `W` is as wide, of uint32_t.
template <typename V, typename W>
POSEMBED_INLINE V exp_of_negative(V x) {
  const auto all = [](float value) { return V{} + value; };
  // x = n ln 2 + r: adding 1.5 * 2^23 rounds to the integer n and leaves it in the lowest bits.
  const V shifted = fma(x, all(1.44269504f), all(0x1.8p23f));
  const V n = shifted - all(0x1.8p23f);
  const V r = fma(n, all(1.90465421e-9f), fma(n, all(-0.693147182f), x));  // ln 2 in two parts
  // The series up to r^7: with |r| <= 0.35 the next term is below 6e-9.
  V sum = all(1.0f / 5040);
  const float terms[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  for (const float term : terms) sum = fma(sum, r, all(term));
  W bits;
  memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + (W{} + 0x3f800000u);
  V power;
  memcpy(&power, &bits, sizeof power);
  return x < all(-87.3f) ? V{} : sum * power;
}

POSEMBED_INLINE float exp_of_negative(float x) { return exp_of_negative<float, uint32_t>(x); }

}  // namespace posembed::core
