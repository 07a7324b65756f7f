// xPos multiplies a query's pairs by 2^(decay * distance from the centre) and a key's pairs by the
// inverse: Sun et al., "A Length-Extrapolatable Transformer", arXiv:2212.10554. Computed in double
// on every device, which costs little: once per token and pair.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/fma.h"
#include "core/macros.h"

namespace posembed::rotary {

/// 2^(high + low) for |high| <= 1000 and a |low| far below 1: relative error below 4e-16.
POSEMBED_INLINE double exp2(double high, double low) {
  const auto nearest = static_cast<int64_t>(high < 0 ? high - 0.5 : high + 0.5);
  const double exponent = (high - static_cast<double>(nearest)) + low;
  const double x = exponent * 0x1.62e42fefa39efp-1;  // times log(2): 2^exponent = e^x, |x| < 0.35
  double result = 1.0;
  for (int k = 14; k > 0; --k) result = core::fma(result, x * (1.0 / k), 1.0);
  const uint64_t bits = static_cast<uint64_t>(nearest + 1023) << 52;
  double power;
  memcpy(&power, &bits, sizeof power);
  return result * power;
}

/// An amplitude as inner * outer, because it may overflow a float although its product with a tiny
/// number does not.
struct Amplitude {
  double inner, outer;
};

/// 2^(decay * distance) for results of type C. Saturates so that ordinary numbers become infinity
/// or zero, but 0 stays 0.
template <typename C>
POSEMBED_INLINE Amplitude amplitude_at(double decay, double distance) {
  constexpr double limit = std::is_same_v<C, double> ? 1000.0 : 220.0;
  const double exponent = decay * distance;
  const double value = exponent > limit    ? exp2(limit, 0.0)
                       : exponent < -limit ? exp2(-limit, 0.0)
                                           : exp2(exponent, core::fma(decay, distance, -exponent));
  if (std::is_same_v<C, double> || (value > 0x1p-100 && value < 0x1p100)) return {value, 1.0};
  const double outer = value < 1.0 ? 0x1p-100 : 0x1p100;
  return {value / outer, outer};
}

}  // namespace posembed::rotary
