// Keys of configuration files that no reader has taken. A key about positions raises, so a new name
// for the base or the scaling is never passed over; all others are ignored.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "configuration/keys.h"

namespace posembed::configuration {

/// Throws c10::ValueError for remaining keys about positions.
/// @param accounted  keys that the model's configuration class knows
/// @param ignore  keys that the caller knows
void check_understood(const Keys& keys, const std::set<std::string>& accounted,
                      const std::vector<std::string>& ignore);

}  // namespace posembed::configuration
