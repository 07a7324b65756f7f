// A Hugging Face configuration: transformers 4 and 5, flat or nested by the kind of layer.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "configuration/fields.h"
#include "posembed/configuration.h"
#include "posembed/rotary_specification.h"

namespace posembed::configuration::huggingface {

/// See RotarySpec::from_huggingface. `fields` is that of a part, `accounted` the keys that need not
/// be understood here.
RotarySpec read(const Fields& fields, const ConfigurationOptions& options,
                const std::set<std::string>& accounted);

/// See RotarySpec::for_layers.
std::vector<std::optional<RotarySpec>> read_layers(const Fields& fields,
                                                   const ConfigurationOptions& options,
                                                   const std::set<std::string>& accounted);

/// The model type; throws c10::ValueError for one without a specification.
std::string checked_type(const Fields& fields);

}  // namespace posembed::configuration::huggingface
