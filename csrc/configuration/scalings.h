// Reads the scaling from rope_parameters (transformers 5) or rope_scaling (4).
#pragma once

#include <string>
#include <vector>

#include "configuration/keys.h"
#include "posembed/rotary_specification.h"

namespace posembed::configuration {

/// The scaling's type, from its new or its legacy key.
std::string rope_type(Keys& rope);

/// The scaling of rope_parameters. Leaves the keys of other types, which are then rejected.
RotaryScaling read_scaling(Keys& rope, Keys& config);

/// Divides the frequencies, scaled or not, pair by pair: LongRoPE with one list for every length.
/// Keeps the attention factor.
/// @param divisors  [rotary_dim / 2]
/// @param length  the context length of training
RotarySpec divided(const RotarySpec& spec, const std::vector<double>& divisors, int64_t length);

/// The attention factor of a scaling.
double attention_factor_of(const RotaryScaling& scaling);

/// The context length of training, which some scalings depend on; std::nullopt for the others.
std::optional<int64_t> original_length_of(const RotaryScaling& scaling);

/// Radians per position of each pair, [rotary_dim / 2]; throws c10::ValueError as check() does.
std::vector<double> frequencies_of(const RotarySpec& spec);

}  // namespace posembed::configuration
