// Rotary frequencies to more than double precision: a position multiplies their error.
#pragma once

#include <cstdint>
#include <vector>

#include "core/double_double.h"

namespace posembed::rotary {

/// The plain series base^(-2i / rotary_dim) for i in [0, rotary_dim / 2), in radians per position,
/// relative error below 2^-98. Su et al., "RoFormer", 2021.
///
/// Requires base > 0 and an even rotary_dim >= 0.
std::vector<core::DoubleDouble> geometric_frequencies(double base, int64_t rotary_dim);

}  // namespace posembed::rotary
