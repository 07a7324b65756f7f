// Rotations of image and video models by name, and by the config.json of diffusers: see
// RotarySpec::from_preset. rotary_presets.json has their numbers, each with its source.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "configuration/fields.h"
#include "posembed/configuration.h"
#include "posembed/rotary_specification.h"

namespace posembed::configuration::presets {

/// rotary_presets.json.
const json& table();

/// See RotarySpec::from_preset.
RotarySpec named(const std::string& name, std::optional<int64_t> head_dim);

/// Whether a configuration is one of diffusers, which names its class.
bool is_diffusers(const Fields& fields);

/// The specification of a configuration of diffusers. Throws c10::ValueError for unknown classes,
/// missing keys and options, none of which has an effect.
RotarySpec read_diffusers(const Fields& fields, const ConfigurationOptions& options);

}  // namespace posembed::configuration::presets
