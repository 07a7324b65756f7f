// What a configuration says about the scale of scores.
#pragma once

#include <optional>
#include <string>

#include "configuration/fields.h"
#include "posembed/rotary_specification.h"

namespace posembed::configuration {

/// The scale of scores in layers that rotate as `spec`; std::nullopt if it is 1.
/// @param fields  the configuration of config.json, params.json or GGUF
/// @param kind  the kind of these layers, if the configuration names kinds
std::optional<ScoreScale> score_scale_of(const Fields& fields, const RotarySpec& spec,
                                         const std::optional<std::string>& kind);

/// The scale of scores in layers of a kind that do not rotate; std::nullopt if it is 1, or if they
/// have no attention.
std::optional<ScoreScale> score_scale_without_rotation(const Fields& fields,
                                                       const std::optional<std::string>& kind);

}  // namespace posembed::configuration
