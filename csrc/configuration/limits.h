// The largest counts that a configuration may state. Readers, and the models' own classes, repeat
// work or take memory for each layer, head and label, so that a few digits could ask for hours.
#pragma once

#include "configuration/fields.h"

namespace posembed::configuration {

/// Far more layers than any model has; each sees a copy of the configuration.
inline constexpr int64_t most_layers = 1024;

/// Throws c10::ValueError for a count beyond its limit, at any depth. Which key is a count, its
/// name tells.
void check_counts(const Fields& fields);

/// Throws c10::ValueError if each of `layers` layers cannot have a copy of the configuration.
void check_copies(const Fields& fields, size_t layers);

}  // namespace posembed::configuration
