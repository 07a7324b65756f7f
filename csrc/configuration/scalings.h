// rope_parameters (transformers 5) and rope_scaling (4): from a type's keys to a scaling.
#pragma once

#include <string>
#include <vector>

#include "configuration/keys.h"
#include "posembed/rotary_specification.h"

namespace posembed::configuration {

/// The scaling's type, in its new or its legacy key.
std::string rope_type(Keys& rope);

/// The scaling of rope_parameters; the keys of other types are left, to be refused.
RotaryScaling read_scaling(Keys& rope, Keys& config);

/// Frequencies, scaled or not, divided pair by pair: LongRoPE with one list for every length. The
/// attention factor stays.
/// @param divisors  [rotary_dim / 2]
/// @param length  the context of training
RotarySpec divided(const RotarySpec& spec, const std::vector<double>& divisors, int64_t length);

/// The attention factor of a scaling.
double attention_factor_of(const RotaryScaling& scaling);

/// The context of training, by which some scalings decide; none for those that do not.
std::optional<int64_t> original_length_of(const RotaryScaling& scaling);

/// Radians per position of each pair, [rotary_dim / 2]; throws c10::ValueError as check() does.
std::vector<double> frequencies_of(const RotarySpec& spec);

}  // namespace posembed::configuration
