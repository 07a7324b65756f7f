// The specification of a configuration, of whatever form it is.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "configuration/fields.h"
#include "posembed/configuration.h"
#include "posembed/rotary_specification.h"

namespace posembed::configuration {

/// A file, or the part that was asked for, as the model's own configuration class completes it.
struct Completed {
  Fields fields;
  std::set<std::string> known;  // keys that the class knows, which need not be understood here
};

/// See RotarySpec::from_huggingface. `completed` stands for the file where it is given.
RotarySpec read_rotary(const Fields& fields, const ConfigurationOptions& options,
                       const std::optional<Completed>& completed = std::nullopt);

/// See RotarySpec::for_layers.
std::vector<std::optional<RotarySpec>> read_rotary_layers(
    const Fields& fields, const ConfigurationOptions& options,
    const std::optional<Completed>& completed = std::nullopt);

}  // namespace posembed::configuration
