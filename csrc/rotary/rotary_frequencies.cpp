#include <algorithm>
#include <type_traits>

#include "rotary/rotary.h"

namespace posembed::rotary {
namespace {

using core::DoubleDouble;

/// A blend of frequencies: `part` of `kept`, the rest of `stretched`.
DoubleDouble blend(DoubleDouble kept, DoubleDouble part, DoubleDouble stretched) {
  return kept * part + stretched * (1.0 - part);
}

/// The fractional pair index that turns by `radians` within `length` positions.
template <typename Number>
Number pair_with_radians(Number radians, Number base, int64_t length, double rotary_dim) {
  using std::log;
  // Keep the order of the paper's code, because rounding decides between neighbouring whole pairs.
  return rotary_dim * log(static_cast<double>(length) / radians) / (2.0 * log(base));
}

/// YaRN's range in the precision of Number; `turn` is 2 pi.
template <typename Number>
YarnRange<Number> yarn_range(Number turn, Number base, const YarnBlend& blend, int64_t rotary_dim) {
  const double dim = static_cast<double>(rotary_dim);
  Number begin = pair_with_radians(blend.fast * turn, base, blend.original_max_positions, dim);
  Number end = pair_with_radians(blend.slow * turn, base, blend.original_max_positions, dim);
  if constexpr (std::is_same_v<Number, double>) {
    if (blend.truncate) {
      begin = std::floor(begin);
      end = std::ceil(end);
    }
  }
  begin = std::max<Number>(begin, 0.0);
  end = std::min<Number>(end, dim - 1.0);
  if (begin == end) end = end + 0.001;  // as in the paper's code, so that the ramp has a slope
  return {begin, end};
}

/// Whole pairs as in the paper's code; fractional ones are exact.
YarnRange<DoubleDouble> exact_yarn_range(double base, const YarnBlend& blend, int64_t rotary_dim) {
  if (!blend.truncate) {
    return yarn_range<DoubleDouble>(core::constants::two_pi, base, blend, rotary_dim);
  }
  const YarnRange<double> whole = yarn_range(base, blend, rotary_dim);
  return {whole.begin, whole.end};
}

}  // namespace

Series geometric_frequencies(DoubleDouble base, int64_t rotary_dim) {
  const DoubleDouble log_base = core::log(base);
  Series frequencies;
  frequencies.reserve(static_cast<size_t>(rotary_dim / 2));
  for (int64_t i = 0; i < rotary_dim; i += 2) {
    const DoubleDouble exponent =
        DoubleDouble(static_cast<double>(-i)) / static_cast<double>(rotary_dim);
    frequencies.push_back(core::exp(exponent * log_base));
  }
  return frequencies;
}

Series restarted_frequencies(DoubleDouble base, const std::vector<int64_t>& axis_of_pair) {
  Series frequencies(axis_of_pair.size());
  const int64_t axes = 1 + *std::max_element(axis_of_pair.begin(), axis_of_pair.end());
  for (int64_t axis = 0; axis < axes; ++axis) {
    const auto count = std::count(axis_of_pair.begin(), axis_of_pair.end(), axis);
    const Series series = geometric_frequencies(base, 2 * count);
    auto next = series.begin();
    for (size_t pair = 0; pair < axis_of_pair.size(); ++pair) {
      if (axis_of_pair[pair] == axis) frequencies[pair] = *next++;
    }
  }
  return frequencies;
}

DoubleDouble ntk_base(double base, double factor, int64_t rotary_dim) {
  const double dim = static_cast<double>(rotary_dim);
  return base * core::pow(factor, DoubleDouble(dim) / (dim - 2.0));
}

YarnRange<double> yarn_range(double base, const YarnBlend& blend, int64_t rotary_dim) {
  return yarn_range<double>(core::constants::two_pi.high, base, blend, rotary_dim);
}

void scale_yarn(Series& series, double base, double factor, const YarnBlend& blended) {
  const auto [begin, end] =
      exact_yarn_range(base, blended, 2 * static_cast<int64_t>(series.size()));
  for (size_t pair = 0; pair < series.size(); ++pair) {
    const DoubleDouble clamped = std::clamp<DoubleDouble>(
        static_cast<double>(pair), std::min(begin, end), std::max(begin, end));
    const DoubleDouble kept = (end - clamped) / (end - begin);
    series[pair] = blend(series[pair], kept, series[pair] / factor);
  }
}

void scale_llama3(Series& series, double factor, double low, double high,
                  int64_t original_max_positions) {
  const double length = static_cast<double>(original_max_positions);
  for (DoubleDouble& frequency : series) {
    const DoubleDouble turns = length * frequency / core::constants::two_pi;
    if (!(turns < high)) continue;  // also if the factors are equal and nothing is blended
    const DoubleDouble kept = turns < low ? 0.0 : (turns - low) / (DoubleDouble(high) - low);
    frequency = blend(frequency, kept, frequency / factor);
  }
}

}  // namespace posembed::rotary
