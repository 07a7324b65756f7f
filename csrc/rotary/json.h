// A specification out of its canonical JSON text.
#pragma once

#include <string>

#include "posembed/rotary_specification.h"

namespace posembed::rotary {

/// Reads what RotarySpec::to_json() wrote; missing keys have their defaults. Raises c10::ValueError
/// for text that is not JSON and for keys that are not fields; values are not looked at.
RotarySpec parse(const std::string& text);

}  // namespace posembed::rotary
