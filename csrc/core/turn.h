// Angles as fractions of a turn in fixed point. Position times turns per position, wrapped by
// integer overflow, is the exactly reduced angle, at any position. Sine and cosine are minimax
// polynomials on an eighth of a turn either way, in explicit fused multiply-adds, so every
// instruction set and CUDA give the same bits.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/fma.h"
#include "core/macros.h"
#include "core/scalar.h"

namespace posembed::core {

/// A fraction of a turn, in units of 2^-64.
using Turn64 = uint64_t;

/// A fraction of a turn, in units of 2^-128.
struct Turn128 {
  uint64_t high = 0;
  uint64_t low = 0;
};

/// The turn type that results of type T need.
template <typename T>
using TurnOf = std::conditional_t<std::is_same_v<T, double>, Turn128, Turn64>;

/// Turns per position in that type, from `source.turns` or `source.wide_turns`.
template <typename T, typename Source>
POSEMBED_INLINE const TurnOf<T>* turns_of(const Source& source) {
  if constexpr (std::is_same_v<T, double>) {
    return source.wide_turns;
  } else {
    return source.turns;
  }
}

POSEMBED_INLINE uint64_t multiply_high(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(a, b);
#else
  __extension__ using Wide = unsigned __int128;
  return static_cast<uint64_t>(static_cast<Wide>(a) * b >> 64);
#endif
}

POSEMBED_INLINE uint32_t multiply_high(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
}

POSEMBED_INLINE Turn64 round_to_turn64(Turn128 turn) { return turn.high + (turn.low >> 63); }

/// The angle at `position` for `turn` turns per position, whole turns dropped.
POSEMBED_INLINE Turn64 phase(int64_t position, Turn64 turn) {
  return static_cast<uint64_t>(position) * turn;
}

POSEMBED_INLINE Turn128 phase(int64_t position, Turn128 turn) {
  const uint64_t factor = static_cast<uint64_t>(position);
  // A negative position reads as 2^64 more; subtract that multiple of the turn.
  const uint64_t excess = position < 0 ? turn.low : 0;
  return {turn.high * factor + multiply_high(turn.low, factor) - excess, turn.low * factor};
}

/// Whether turn_from_radians() accepts the angle: finite, and below 2^63.
POSEMBED_INLINE bool has_turn(double radians) { return radians > -0x1p63 && radians < 0x1p63; }

/// The angle `radians`, taken as an exact number, as a fraction of a turn, whole turns dropped. The
/// error is below 2^-127, small enough for any position. Requires has_turn(radians).
POSEMBED_INLINE Turn128 turn_from_radians(double radians) {
  uint64_t bits;
  memcpy(&bits, &radians, sizeof bits);
  const int exponent = static_cast<int>(bits >> 52 & 0x7ff);
  const uint64_t fraction = bits & 0xfffffffffffffu;
  // |radians| = mantissa * 2^(power - 1075)
  const uint64_t mantissa = exponent == 0 ? fraction : fraction | uint64_t{1} << 52;
  const int power = exponent == 0 ? 1 : exponent;
  // 1 / (2 pi) in units of 2^-192, least significant word first, times the mantissa.
  constexpr uint64_t low = 0x36d8a5664f10e410u, middle = 0x7f09d5f47d4d3770u,
                     high = 0x28be60db9391054au;
  uint64_t word[4];
  word[0] = mantissa * low;
  uint64_t carry = multiply_high(mantissa, low);
  word[1] = mantissa * middle + carry;
  carry = multiply_high(mantissa, middle) + (word[1] < carry ? 1 : 0);
  word[2] = mantissa * high + carry;
  word[3] = multiply_high(mantissa, high) + (word[2] < carry ? 1 : 0);
  // The product is in units of 2^(power - 1075 - 192); shift it right to units of 2^-128.
  int shift = 1075 + 192 - 128 - power;
  for (; shift >= 64; shift -= 64) {
    word[0] = word[1];
    word[1] = word[2];
    word[2] = word[3];
    word[3] = 0;
  }
  const Turn128 turn{word[1] >> shift | word[2] << 1 << (63 - shift),
                     word[0] >> shift | word[1] << 1 << (63 - shift)};
  const bool negative = bits >> 63 != 0;
  return negative ? Turn128{~turn.high + (turn.low == 0 ? 1 : 0), uint64_t{0} - turn.low} : turn;
}

/// sin(2 pi x) and cos(2 pi x) for |x| <= 1/8. The coefficient 2 pi comes in two parts: rounding it
/// once would cost half a unit in the last place.
POSEMBED_INLINE void sincos_eighth(float x, float* sine, float* cosine) {
  const float square = x * x;
  float odd = fma(-75.240341f, square, 81.588135f);
  odd = fma(odd, square, -41.341629f);
  odd = fma(odd, square, -2.61502294e-07f);
  *sine = fma(x, 6.28318548f, x * odd);
  float even = fma(59.2463722f, square, -85.4437561f);
  even = fma(even, square, 64.9393234f);
  even = fma(even, square, -19.7392082f);
  *cosine = fma(even, square, 1.0f);
}

POSEMBED_INLINE void sincos_eighth(double x, double* sine, double* cosine) {
  const double square = x * x;
  double odd = fma(-0.7112331866104479, square, 3.819764530931742);
  odd = fma(odd, square, -15.094639851079624);
  odd = fma(odd, square, 42.05869392239156);
  odd = fma(odd, square, -76.70585975295597);
  odd = fma(odd, square, 81.60524927607479);
  odd = fma(odd, square, -41.34170224039976);
  odd = fma(odd, square, 2.448345952047328e-16);
  *sine = fma(x, 6.283185307179586, x * odd);
  double even = fma(0.2794794940261841, square, -1.714317563954908);
  even = fma(even, square, 7.9035352321579895);
  even = fma(even, square, -26.426256773083665);
  even = fma(even, square, 60.2446413718225);
  even = fma(even, square, -85.45681720669357);
  even = fma(even, square, 64.9393940226683);
  even = fma(even, square, -19.739208802178716);
  *cosine = fma(even, square, 1.0);
}

/// `value`, negated where the highest bit of `sign` is set.
POSEMBED_INLINE float flip_sign(float value, uint32_t sign) {
  return float_from_bits(float_bits(value) ^ (sign & 0x80000000u));
}

POSEMBED_INLINE double flip_sign(double value, uint64_t sign) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  bits ^= sign & uint64_t{1} << 63;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/// Sine and cosine of `turn`: absolute error <= 1.5e-7. Only the upper 32 bits are used; the others
/// change the angle by less than 1.5e-9.
///
///     sincos_turn(phase(position, turn), &sine, &cosine);
POSEMBED_INLINE void sincos_turn(Turn64 turn, float* sine, float* cosine) {
  constexpr uint32_t quarter = uint32_t{1} << 30;
  const auto upper = static_cast<uint32_t>(turn >> 32);
  const uint32_t nearest = upper + quarter / 2;  // its two highest bits: the nearest quarter turn
  const int32_t rest = static_cast<int32_t>(upper << 2);  // from there, in units of 2^-34
  float s, c;
  sincos_eighth(static_cast<float>(rest) * 0x1p-34f, &s, &c);
  const bool odd = (nearest & quarter) != 0;
  *sine = flip_sign(odd ? c : s, nearest);
  *cosine = flip_sign(odd ? s : c, nearest + quarter);
}

/// Sine and cosine of `turn`: absolute error <= 1e-15.
POSEMBED_INLINE void sincos_turn(Turn128 turn, double* sine, double* cosine) {
  constexpr uint64_t quarter = uint64_t{1} << 62;
  const uint64_t upper = turn.high, nearest = upper + quarter / 2;
  const int64_t rest = static_cast<int64_t>(upper << 2);
  double s, c;
  sincos_eighth(static_cast<double>(rest) * 0x1p-66, &s, &c);
  const bool odd = (nearest & quarter) != 0;
  *sine = flip_sign(odd ? c : s, nearest);
  *cosine = flip_sign(odd ? s : c, nearest + quarter);
}

}  // namespace posembed::core
