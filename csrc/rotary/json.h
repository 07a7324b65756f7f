// A specification as text: canonical JSON, and the short form that modules print.
#pragma once

#include <string>

#include "posembed/rotary_specification.h"

namespace posembed::rotary {

/// Reads what RotarySpec::to_json() wrote; missing keys have their defaults. Raises c10::ValueError
/// for text that is not JSON and for keys that are not fields; values are not looked at.
RotarySpec parse(const std::string& text);

/// "128, base=500000, scaling=LinearScaling(factor=8)": what differs from the defaults.
std::string describe(const RotarySpec& spec);

}  // namespace posembed::rotary
