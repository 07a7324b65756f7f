// Reads the specification from a configuration of any form.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "configuration/fields.h"
#include "posembed/configuration.h"
#include "posembed/rotary_specification.h"

namespace posembed::configuration {

/// A file, or the requested part, as completed by the model's own configuration class.
struct Completed {
  Fields fields;
  std::set<std::string> known;  // keys that the class knows, which need not be understood here
};

/// See RotarySpec::from_huggingface. `completed`, if given, is read in place of the file.
RotarySpec read_rotary(const Fields& fields, const ConfigurationOptions& options,
                       const std::optional<Completed>& completed = std::nullopt);

/// See RotarySpec::for_layers.
std::vector<std::optional<RotarySpec>> read_rotary_layers(
    const Fields& fields, const ConfigurationOptions& options,
    const std::optional<Completed>& completed = std::nullopt);

/// See ScoreScale::for_layers.
std::vector<std::optional<ScoreScale>> read_score_scales(
    const Fields& fields, const ConfigurationOptions& options,
    const std::optional<Completed>& completed = std::nullopt);

}  // namespace posembed::configuration
