// Element types of kernels: storage, conversion to the compute type, and one rounding back. Host,
// device and every instruction set give the same bits, denormals included (AVX512_BF16's own
// instruction would flush them). A NaN stays one; on a GPU, as in torch, it loses its payload.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/macros.h"

namespace posembed::core {

enum class Scalar : int8_t { float32, float64, bfloat16, float16 };

/// bfloat16 storage: the upper half of a float32.
struct BFloat16 {
  uint16_t bits;
};

/// IEEE 754 binary16 storage.
struct Float16 {
  uint16_t bits;
};

/// The type of arithmetic on T: double for double, float for everything else.
template <typename T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

POSEMBED_INLINE uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

POSEMBED_INLINE float float_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

POSEMBED_INLINE float load(float value) { return value; }
POSEMBED_INLINE double load(double value) { return value; }
POSEMBED_INLINE float load(BFloat16 value) { return float_from_bits(uint32_t{value.bits} << 16); }

POSEMBED_INLINE float load(Float16 value) {
#if defined(__CUDA_ARCH__)
  float number;
  asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(value.bits));
  return number;
#else
  // Shifted into float32's fields, the exponent is 112 too small; a multiplication by 2^112
  // corrects it and normalises denormals. Infinity and NaN get float32's own exponent.
  const uint32_t magnitude = (value.bits & 0x7fffu) << 13;
  const uint32_t finite = float_bits(float_from_bits(magnitude) * float_from_bits(0x77800000u));
  const uint32_t result = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite;
  return float_from_bits(result | (uint32_t{value.bits} & 0x8000u) << 16);
#endif
}

/// Element `index` of floating data of any type. A NaN becomes the one that arithmetic would give:
/// vector stores of bfloat16 rely on its lower half (core/vector.h).
template <typename C>
POSEMBED_INLINE C read_floating(const void* data, Scalar type, int64_t index) {
  C value;
  switch (type) {
    case Scalar::float64:
      value = static_cast<C>(static_cast<const double*>(data)[index]);
      break;
    case Scalar::bfloat16:
      value = load(static_cast<const BFloat16*>(data)[index]);
      break;
    case Scalar::float16:
      value = load(static_cast<const Float16*>(data)[index]);
      break;
    default:
      value = static_cast<const float*>(data)[index];
  }
  return value == value ? value : static_cast<C>(NAN);
}

POSEMBED_INLINE void store(float value, float* out) { *out = value; }
POSEMBED_INLINE void store(double value, double* out) { *out = value; }

/// Round to nearest, ties to even. A GPU turns every NaN into 0x7fff.
POSEMBED_INLINE void store(float value, BFloat16* out) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  // The compiler combines two neighbours into one instruction; the steps below take 14.
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out->bits) : "f"(value));
#else
  const uint32_t bits = float_bits(value);
  // Add half of the last kept place, minus one where that place is even.
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  out->bits = static_cast<uint16_t>(is_nan ? (bits >> 16 | 0x40u) : rounded);
#endif
}

POSEMBED_INLINE void store(float value, Float16* out) {
#if defined(__CUDA_ARCH__)
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out->bits) : "f"(value));
#else
  const uint32_t bits = float_bits(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Compute every case and select one, so that compilers can vectorise the surrounding loops.
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  // Adding 0.5 lines the value up so that float32's own rounding keeps a multiple of 2^-24,
  // binary16's smallest denormal.
  const uint32_t small = magnitude < 0x38800000u ? magnitude : 0u;
  const uint32_t denormal = float_bits(float_from_bits(small) + 0.5f) - 0x3f000000u;
  const uint32_t nan = 0x7e00u | (magnitude >> 13 & 0x3ffu);
  uint32_t result = magnitude < 0x38800000u ? denormal : normal;
  result = magnitude >= 0x477ff000u ? 0x7c00u : result;  // 65520 and above round to infinity
  result = magnitude > 0x7f800000u ? nan : result;
  out->bits = static_cast<uint16_t>(result | (bits >> 16 & 0x8000u));
#endif
}

/// Names a type in a call, so that a generic lambda can take it as an argument.
template <typename T>
struct Tag {
  using type = T;
};

/// Calls `function(Tag<T>{})` with the C++ type of `scalar`.
template <typename Function>
inline decltype(auto) visit_scalar(Scalar scalar, Function&& function) {
  switch (scalar) {
    case Scalar::float64:
      return function(Tag<double>{});
    case Scalar::bfloat16:
      return function(Tag<BFloat16>{});
    case Scalar::float16:
      return function(Tag<Float16>{});
    default:
      return function(Tag<float>{});
  }
}

inline int64_t size_of(Scalar scalar) {
  return visit_scalar(scalar,
                      [](auto tag) -> int64_t { return sizeof(typename decltype(tag)::type); });
}

// ------------------------------------------------------------------------------------------ float8
// e4m3fn for key-value caches: 4 bits of exponent, 3 of mantissa, no infinity, maximum 448.
// Micikevicius et al., "FP8 Formats for Deep Learning", 2022.

struct Float8 {
  uint8_t bits;
};

/// The bits of a number rounded to nearest even; numbers beyond 448, infinities included, become
/// 448, as in PyTorch after a clamp to 448. NaN stays NaN.
POSEMBED_INLINE uint32_t float8_bits(float value) {
  constexpr uint32_t largest = 0x43e00000u, smallest_normal = 0x3c800000u, infinity = 0x7f800000u;
  const uint32_t bits = float_bits(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t kept = magnitude < largest ? magnitude : largest;
  const uint32_t power = kept & infinity;
  const uint32_t binade = power > smallest_normal ? power : smallest_normal;
  // Adding 2^20 times the binade lines the value up so that float32's own rounding keeps a multiple
  // of an eighth of it.
  const uint32_t shift = binade + (20u << 23);
  const uint32_t eighths = float_bits(float_from_bits(kept) + float_from_bits(shift)) - shift;
  const uint32_t result = eighths + ((binade - smallest_normal) >> 20);
  return (magnitude > infinity ? 0x7fu : result) | (bits >> 24 & 0x80u);
}

/// The bits of two numbers, the first in the lower byte. On a GPU a NaN loses its sign.
POSEMBED_INLINE uint16_t float8_pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
#else
  return static_cast<uint16_t>(float8_bits(first) | float8_bits(second) << 8);
#endif
}

POSEMBED_INLINE void store(float value, Float8* out) {
  out->bits = static_cast<uint8_t>(float8_bits(value));
}

}  // namespace posembed::core
