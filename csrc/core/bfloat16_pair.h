// Packed arithmetic on two bfloat16 numbers (bf16x2). Every result is rounded to nearest even and
// has the bits of a float32 result rounded to bfloat16: float32 products of bfloat16 numbers are
// exact, and rounding a sum twice does not change it. The exception is a product below 2^-126,
// which is not exact in float32.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/macros.h"
#include "core/scalar.h"

namespace posembed::core {

/// Two bfloat16 numbers, the first in the lower half.
struct BFloat16Pair {
  uint32_t bits;
};

POSEMBED_INLINE BFloat16Pair pair_of(float first, float second) {
  BFloat16 halves[2];
  store(first, halves);
  store(second, halves + 1);
  return {halves[0].bits | uint32_t{halves[1].bits} << 16};
}

POSEMBED_INLINE float first_of(BFloat16Pair pair) { return float_from_bits(pair.bits << 16); }
POSEMBED_INLINE float second_of(BFloat16Pair pair) {
  return float_from_bits(pair.bits & 0xffff0000u);
}

/// (second, first).
POSEMBED_INLINE BFloat16Pair swapped(BFloat16Pair pair) {
  return {pair.bits >> 16 | pair.bits << 16};
}

POSEMBED_INLINE BFloat16Pair operator*(BFloat16Pair a, BFloat16Pair b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  BFloat16Pair product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product.bits) : "r"(a.bits), "r"(b.bits));
  return product;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  BFloat16Pair product;  // a * b + -0: adding -0 changes no product
  asm("fma.rn.bf16x2 %0, %1, %2, %3;"
      : "=r"(product.bits)
      : "r"(a.bits), "r"(b.bits), "r"(0x80008000u));
  return product;
#else
  return pair_of(first_of(a) * first_of(b), second_of(a) * second_of(b));
#endif
}

POSEMBED_INLINE BFloat16Pair operator+(BFloat16Pair a, BFloat16Pair b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  BFloat16Pair sum;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum.bits) : "r"(a.bits), "r"(b.bits));
  return sum;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  BFloat16Pair sum;  // a * 1 + b
  asm("fma.rn.bf16x2 %0, %1, %2, %3;"
      : "=r"(sum.bits)
      : "r"(a.bits), "r"(0x3f803f80u), "r"(b.bits));
  return sum;
#else
  return pair_of(first_of(a) + first_of(b), second_of(a) + second_of(b));
#endif
}

/// Both numbers with the opposite sign.
POSEMBED_INLINE BFloat16Pair operator-(BFloat16Pair pair) { return {pair.bits ^ 0x80008000u}; }

}  // namespace posembed::core
