// Frequencies and attention factors of a specification's scaling.
#pragma once

#include "posembed/rotary_specification.h"
#include "rotary/frequencies.h"

namespace posembed::rotary {

struct Scaled {
  Series frequencies;              // [rotary_dim / 2], radians per position
  double attention_factor = 1.0;   // multiplies rotated pairs
  std::vector<double> decay = {};  // xPos: log2 of a query's amplitude per position; or empty
  double decay_center = 0.0;
};

/// Requires a specification that passes RotarySpec::check(). Dynamic scalings give the frequencies
/// for lengths within the original context.
Scaled scaled(const RotarySpec& spec);

YarnBlend blend_of(const YarnScaling& scaling);

/// Raises c10::ValueError, which names the field, if the scaling's numbers are invalid.
void check_scaling(const RotarySpec& spec);

}  // namespace posembed::rotary
