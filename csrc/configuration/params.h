// params.json of Meta and Mistral: interleaved pairs; scalings by names of their own.
#pragma once

#include <optional>
#include <vector>

#include "configuration/fields.h"
#include "posembed/configuration.h"
#include "posembed/rotary_specification.h"

namespace posembed::configuration::params {

/// Whether this is a params.json.
bool is_params(const Fields& fields);

/// The specification of the original release of a Llama or a Mistral.
RotarySpec read(const Fields& fields, const ConfigurationOptions& options);

/// The same for each layer.
std::vector<std::optional<RotarySpec>> read_layers(const Fields& fields,
                                                   const ConfigurationOptions& options);

}  // namespace posembed::configuration::params
