// Rotary frequencies in more than double precision, because positions multiply their error.
#pragma once

#include <cstdint>
#include <vector>

#include "core/double_double.h"

namespace posembed::rotary {

/// Radians per position, one for each pair.
using Series = std::vector<core::DoubleDouble>;

/// The plain series base^(-2i / rotary_dim) for i in [0, rotary_dim / 2), in radians per position,
/// relative error below 2^-98. Su et al., "RoFormer", 2021.
///
/// Requires base > 0 and an even rotary_dim >= 0.
Series geometric_frequencies(core::DoubleDouble base, int64_t rotary_dim);

/// The same, with a whole series for the pairs of each axis.
Series restarted_frequencies(core::DoubleDouble base, const std::vector<int64_t>& axis_of_pair);

/// The base that makes the longest wavelength `factor` times as long: base * factor^(d / (d - 2)).
///
/// Requires rotary_dim > 2.
core::DoubleDouble ntk_base(double base, double factor, int64_t rotary_dim);

/// The range of pairs that YaRN blends: from the pair that makes `fast` turns within
/// `original_max_positions` to the pair that makes `slow`, rounded outwards to whole pairs if
/// `truncate`.
struct YarnBlend {
  int64_t original_max_positions;
  double fast, slow;
  bool truncate;
};

/// The ends of that range; in double they are those of the paper's code.
template <typename Number>
struct YarnRange {
  Number begin, end;
};
YarnRange<double> yarn_range(double base, const YarnBlend& blend, int64_t rotary_dim);

/// Divides the frequencies that YaRN interpolates and blends those in the range `blended`. Peng et
/// al., "YaRN", 2023.
void scale_yarn(Series& series, double base, double factor, const YarnBlend& blended);

/// Llama 3.1: stretches wavelengths over original_max_positions / low by `factor`, keeps those
/// under original_max_positions / high, and blends in between.
void scale_llama3(Series& series, double factor, double low, double high,
                  int64_t original_max_positions);

}  // namespace posembed::rotary
