// Composite models: finds the nested configuration of one part.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "configuration/fields.h"

namespace posembed::configuration {

/// The path of keys to a part, or to the text model; empty if the whole is a text model.
std::vector<std::string> path_of(const Fields& fields, const std::optional<std::string>& part);

/// The file, with its keys where its configuration class looks for them.
Fields normalised(Fields fields);

/// A part, with the model_type that files of an older layout derive from the whole's.
Fields typed(const Fields& fields, const std::optional<std::string>& part);

}  // namespace posembed::configuration
