// Numbers as unevaluated sums of two doubles: about 106 bits. Dekker, "A floating-point technique
// for extending the available precision", 1971; Joldes, Muller and Popescu, "Tight and rigorous
// error bounds for basic building blocks of double-word arithmetic", 2017. Positions multiply the
// error of a frequency, so frequencies are computed in this type before they become turns.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/turn.h"

namespace posembed::core {

struct DoubleDouble {
  double high = 0;
  double low = 0;

  constexpr DoubleDouble() = default;
  constexpr DoubleDouble(double value) : high(value) {}  // NOLINT: a double is a DoubleDouble
  constexpr DoubleDouble(double h, double l) : high(h), low(l) {}
};

// Not inline: the library would show a symbol of which a process has one, whatever the build.
namespace constants {
constexpr DoubleDouble two_pi{0x1.921fb54442d18p+2, 0x1.1a62633145c07p-52};
constexpr DoubleDouble ln_two{0x1.62e42fefa39efp-1, 0x1.abc9e3b39803fp-56};
}  // namespace constants

/// a + b exactly, for |a| >= |b|.
inline DoubleDouble quick_two_sum(double a, double b) {
  const double sum = a + b;
  return {sum, b - (sum - a)};
}

/// a + b exactly.
inline DoubleDouble two_sum(double a, double b) {
  const double sum = a + b;
  const double part = sum - a;
  return {sum, (a - (sum - part)) + (b - part)};
}

/// a * b exactly.
inline DoubleDouble two_product(double a, double b) {
  const double product = a * b;
  return {product, std::fma(a, b, -product)};
}

inline DoubleDouble operator-(DoubleDouble a) { return {-a.high, -a.low}; }

inline DoubleDouble operator+(DoubleDouble a, DoubleDouble b) {
  const DoubleDouble high = two_sum(a.high, b.high);
  const DoubleDouble low = two_sum(a.low, b.low);
  const DoubleDouble sum = quick_two_sum(high.high, high.low + low.high);
  return quick_two_sum(sum.high, sum.low + low.low);
}

inline DoubleDouble operator-(DoubleDouble a, DoubleDouble b) { return a + -b; }

inline DoubleDouble operator*(DoubleDouble a, DoubleDouble b) {
  const DoubleDouble product = two_product(a.high, b.high);
  const double cross = std::fma(a.high, b.low, a.low * b.high);
  return quick_two_sum(product.high, product.low + cross);
}

inline DoubleDouble operator/(DoubleDouble a, DoubleDouble b) {
  const double first = a.high / b.high;
  const DoubleDouble rest = a - b * first;
  const double second = rest.high / b.high;
  const double third = (rest - b * second).high / b.high;
  return quick_two_sum(first, second) + third;
}

inline bool operator==(DoubleDouble a, DoubleDouble b) {
  return a.high == b.high && a.low == b.low;
}
inline bool operator<(DoubleDouble a, DoubleDouble b) {
  return a.high < b.high || (a.high == b.high && a.low < b.low);
}

inline double to_double(DoubleDouble a) { return a.high; }

/// a * 2^exponent, exact unless it leaves double's range.
inline DoubleDouble ldexp(DoubleDouble a, int exponent) {
  return {std::ldexp(a.high, exponent), std::ldexp(a.low, exponent)};
}

/// e^a, relative error below 2^-99 for |a| <= 500.
inline DoubleDouble exp(DoubleDouble a) {
  constexpr int terms = 26;  // (ln 2 / 2)^27 / 27! < 2^-134
  const double twos = std::nearbyint(a.high / constants::ln_two.high);
  const DoubleDouble rest = a - constants::ln_two * twos;
  DoubleDouble sum = 1.0;
  for (int n = terms; n >= 1; --n) sum = 1.0 + sum * rest / static_cast<double>(n);
  return ldexp(sum, static_cast<int>(twos));
}

/// Natural logarithm of a > 0, absolute error below 2^-100 (|log a| + 1).
inline DoubleDouble log(DoubleDouble a) {
  // One step of Halley's method triples the bits of the double estimate.
  const DoubleDouble estimate = std::log(a.high);
  const DoubleDouble e = exp(estimate);
  return estimate + 2.0 * (a - e) / (a + e);
}

/// base^exponent for base > 0.
inline DoubleDouble pow(DoubleDouble base, DoubleDouble exponent) {
  return exp(exponent * log(base));
}

namespace detail {
__extension__ using Fixed128 = unsigned __int128;

/// `value` in units of 2^-128, without its integer part, rounded to nearest.
inline Fixed128 fraction(double value) {
  constexpr int digits = 53;
  int exponent;
  const double mantissa = std::frexp(std::fabs(value), &exponent);
  const Fixed128 integer = static_cast<uint64_t>(std::ldexp(mantissa, digits));
  const int shift = exponent - digits + 128;
  Fixed128 magnitude = 0;
  if (shift >= 0 && shift < 128) magnitude = integer << shift;
  if (shift < 0 && shift > -digits - 1) magnitude = ((integer >> (-shift - 1)) + 1) >> 1;
  return value < 0 ? -magnitude : magnitude;
}
}  // namespace detail

/// An angle in radians as a fraction of a turn. Whole turns are dropped, so negative angles wrap.
inline Turn128 turn_from_radians(DoubleDouble radians) {
  const DoubleDouble turns = radians / constants::two_pi;
  const detail::Fixed128 fixed = detail::fraction(turns.high) + detail::fraction(turns.low);
  return {static_cast<uint64_t>(fixed >> 64), static_cast<uint64_t>(fixed)};
}

}  // namespace posembed::core
