// rope_parameters of transformers 5, flat or one for each kind of layer, and the keys that came
// before them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "configuration/fields.h"
#include "configuration/keys.h"
#include "configuration/layers.h"

namespace posembed::configuration {

/// Whether each kind of layer has rope_parameters of its own.
bool is_nested(const Fields& rope);

/// rope_parameters as they are, or out of the keys that came before them.
Fields legacy(const Fields& fields);

/// rope_parameters of all kinds of layers.
std::vector<Fields> blocks(const Fields& rope);

/// The rope_parameters of one kind of layer; none where such layers are not rotated.
std::optional<Keys> parameters(Keys& config, const Kind& kind);

/// The base of this layer among those of all layers; 0 where it does not rotate.
json own_base(Keys& config);

}  // namespace posembed::configuration
