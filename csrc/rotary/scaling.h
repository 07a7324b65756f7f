// The frequencies and the attention factor that a specification's scaling gives.
#pragma once

#include "posembed/rotary_specification.h"
#include "rotary/frequencies.h"

namespace posembed::rotary {

struct Scaled {
  Series frequencies;              // [rotary_dim / 2], radians per position
  double attention_factor = 1.0;   // what rotated pairs are multiplied by
  std::vector<double> decay = {};  // xPos: log2 of a query's amplitude per position; or empty
  double decay_center = 0.0;
};

/// The frequencies of a specification that passes RotarySpec::check(); for dynamic scalings, those
/// within the original context.
Scaled scaled(const RotarySpec& spec);

YarnBlend blend_of(const YarnScaling& scaling);

/// Raises c10::ValueError, naming the scaling's field, where its numbers make no sense.
void check_scaling(const RotarySpec& spec);

}  // namespace posembed::rotary
