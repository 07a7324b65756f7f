// Reads ALiBi from a Hugging Face configuration: the preset of its model type, with the model's
// numbers.
#pragma once

#include "configuration/fields.h"

namespace posembed::configuration {

/// The preset for a configuration, for all heads of the model: {"name", "num_heads", "options"};
/// options are "max_bias", "head_dim", "factor" or "train_length". Throws c10::ValueError for
/// models without ALiBi, and for missing or unknown keys about ALiBi.
json alibi_preset(const Fields& fields);

}  // namespace posembed::configuration
