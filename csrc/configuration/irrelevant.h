// Keys of configuration files that do not affect rotary positions.
//
// Reading is strict: a key that is neither read, nor known to the model's configuration class, nor
// listed here raises. A new name for the base or the scaling is therefore never ignored.
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "configuration/keys.h"

namespace posembed::configuration {

/// Whether a key is known not to affect rotary positions.
bool is_irrelevant(std::string_view key);

/// Throws c10::ValueError for remaining keys that may concern positions.
/// @param accounted  keys that the model's configuration class knows
/// @param ignore  keys that the caller knows
void check_understood(const Keys& keys, const std::set<std::string>& accounted,
                      const std::vector<std::string>& ignore);

}  // namespace posembed::configuration
