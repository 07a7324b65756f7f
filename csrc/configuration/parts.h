// Composite models: finds the nested configuration of one part.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "configuration/fields.h"

namespace posembed::configuration {

/// The path of keys to a part, or to the text model; empty if the whole is a text model. Parts of
/// layers are not in the path.
std::vector<std::string> path_of(const Fields& fields, const std::optional<std::string>& part);

/// The part of a layer that the last word of a path names: "attention", "indexer" or
/// "linear_attention".
std::optional<std::string> layer_part(const std::optional<std::string>& part);

/// The file, with its keys where its configuration class looks for them.
Fields normalised(Fields fields);

/// A part, with the model_type that files of an older layout derive from the whole's.
Fields typed(const Fields& fields, const std::optional<std::string>& part);

}  // namespace posembed::configuration
