// Fused multiply-add with one rounding, so that kernels give the same bits on every processor.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/macros.h"

namespace posembed::core {

#if defined(__CUDA_ARCH__) || defined(__FMA__) || defined(__ARM_FEATURE_FMA)
POSEMBED_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
/// Emulates the instruction: the product is exact in double, the sum is rounded to odd (Boldo and
/// Melquiond, "Emulation of FMA and correctly rounded sums", 2008), and the conversion rounds once.
POSEMBED_INLINE float fma(float a, float b, float c) {
  const double product = static_cast<double>(a) * b;
  double sum = product + c;
  const double part = sum - product;
  const double error = (product - (sum - part)) + (c - part);
  int64_t bits;
  memcpy(&bits, &sum, sizeof bits);
  const bool inexact = (error > 0) | (error < 0);  // false where the error is NaN
  const bool away_from_zero = (error > 0) == (bits >= 0);
  const int64_t even = ~bits & 1;
  bits += (inexact & (even != 0)) ? (away_from_zero ? 1 : -1) : 0;
  memcpy(&sum, &bits, sizeof sum);
  return static_cast<float>(sum);
}
#endif

POSEMBED_INLINE double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }

}  // namespace posembed::core
