// Rules as operators receive them: text, which is parsed once.
#pragma once

#include <memory>
#include <string_view>

#include "posembed/positions.h"

namespace posembed::positions {

/// The rule of a JSON text or of a name. Throws c10::ValueError for others.
std::shared_ptr<const MropeRule> rule_of(std::string_view text);

}  // namespace posembed::positions
