// Reads a Hugging Face configuration of transformers 4 or 5, flat or nested by kind of layer.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "configuration/fields.h"
#include "posembed/configuration.h"
#include "posembed/rotary_specification.h"

namespace posembed::configuration::huggingface {

/// See RotarySpec::from_huggingface. `fields` is the configuration of a part, and `accounted` has
/// the keys that need not be understood here.
RotarySpec read(const Fields& fields, const ConfigurationOptions& options,
                const std::set<std::string>& accounted);

/// See RotarySpec::for_layers.
std::vector<std::optional<RotarySpec>> read_layers(const Fields& fields,
                                                   const ConfigurationOptions& options,
                                                   const std::set<std::string>& accounted);

/// Throws c10::ValueError for a model type without a specification.
void check_supported(const Fields& fields);

}  // namespace posembed::configuration::huggingface
