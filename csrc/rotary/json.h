// Reads a specification from its canonical JSON text.
#pragma once

#include <string>

#include "posembed/rotary_specification.h"

namespace posembed::rotary {

/// Reads the text of RotarySpec::to_json(); missing keys have their defaults. Throws
/// c10::ValueError for text that is not JSON and for unknown keys; does not check values.
RotarySpec parse(const std::string& text);

}  // namespace posembed::rotary
