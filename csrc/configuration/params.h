// Reads params.json of Meta and Mistral: interleaved pairs, and scalings under their own names.
#pragma once

#include <optional>
#include <vector>

#include "configuration/fields.h"
#include "posembed/configuration.h"
#include "posembed/rotary_specification.h"

namespace posembed::configuration::params {

/// Whether this is a params.json.
bool is_params(const Fields& fields);

/// The specification of a Llama or Mistral model in its original release.
RotarySpec read(const Fields& fields, const ConfigurationOptions& options);

/// The same for each layer.
std::vector<std::optional<RotarySpec>> read_layers(const Fields& fields,
                                                   const ConfigurationOptions& options);

}  // namespace posembed::configuration::params
