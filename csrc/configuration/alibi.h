// ALiBi from a Hugging Face configuration: the preset of its model type, with its numbers.
#pragma once

#include "configuration/fields.h"

namespace posembed::configuration {

/// The preset that a configuration means, for all heads of the model: {"name", "num_heads",
/// "options"}; options are "max_bias", "head_dim", "factor" or "train_length".
/// Throws c10::ValueError for models without ALiBi, and for keys about it that are missing or
/// unknown.
json alibi_preset(const Fields& fields);

}  // namespace posembed::configuration
