#include "rotary/frequencies.h"

#include <algorithm>

namespace posembed::rotary {
namespace {

using core::DoubleDouble;

/// The frequency, `part` of it kept and the rest stretched.
DoubleDouble blend(DoubleDouble kept, DoubleDouble part, DoubleDouble stretched) {
  return kept * part + stretched * (1.0 - part);
}

/// The pair (not a whole number) that makes `turns` turns within `length` positions.
double pair_with_turns(double turns, double base, int64_t length, double rotary_dim) {
  // In the order of the paper's code: rounding decides between neighbouring whole pairs.
  const double radians = turns * core::constants::two_pi.high;
  return rotary_dim * std::log(static_cast<double>(length) / radians) / (2.0 * std::log(base));
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

YarnRange yarn_range(double base, int64_t rotary_dim, int64_t original_max_positions, double fast,
                     double slow, bool truncate) {
  const double dim = static_cast<double>(rotary_dim);
  double begin = pair_with_turns(fast, base, original_max_positions, dim);
  double end = pair_with_turns(slow, base, original_max_positions, dim);
  if (truncate) {
    begin = std::floor(begin);
    end = std::ceil(end);
  }
  begin = std::max(begin, 0.0);
  end = std::min(end, dim - 1.0);
  if (begin == end) end += 0.001;  // the paper's code, so that the ramp has a slope
  return {begin, end};
}

void scale_yarn(Series& series, double base, double factor, int64_t original_max_positions,
                double fast, double slow, bool truncate) {
  const auto [begin, end] = yarn_range(base, 2 * static_cast<int64_t>(series.size()),
                                       original_max_positions, fast, slow, truncate);
  for (size_t pair = 0; pair < series.size(); ++pair) {
    const double place =
        std::clamp(static_cast<double>(pair), std::min(begin, end), std::max(begin, end));
    const DoubleDouble kept = (DoubleDouble(end) - place) / (DoubleDouble(end) - begin);
    series[pair] = blend(series[pair], kept, series[pair] / factor);
  }
}

void scale_llama3(Series& series, double factor, double low, double high,
                  int64_t original_max_positions) {
  const double length = static_cast<double>(original_max_positions);
  for (DoubleDouble& frequency : series) {
    const DoubleDouble turns = length * frequency / core::constants::two_pi;
    if (high < turns) continue;
    const DoubleDouble kept = turns < low ? 0.0 : (turns - low) / (DoubleDouble(high) - low);
    frequency = blend(frequency, kept, frequency / factor);
  }
}

}  // namespace posembed::rotary
