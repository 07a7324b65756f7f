// rope_parameters of transformers 5, flat or one for each kind of layer, and the keys that preceded
// them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "configuration/fields.h"
#include "configuration/keys.h"
#include "configuration/layers.h"

namespace posembed::configuration {

/// All names of bases.
std::vector<std::string> all_bases();

/// Whether each kind of layer has rope_parameters of its own.
bool is_nested(const Fields& rope);

/// rope_parameters as they are, or converted from the keys that preceded them.
Fields legacy(const Fields& fields);

/// The rope_parameters of all kinds of layers.
std::vector<Fields> blocks(const Fields& rope);

/// The rope_parameters of one kind of layer; std::nullopt if such layers are not rotated.
std::optional<Keys> parameters(Keys& config, const Kind& kind);

/// This layer's base in a list of all layers' bases; 0 if it does not rotate.
json own_base(Keys& config);

}  // namespace posembed::configuration
