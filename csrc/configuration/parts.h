// Models made of several: the configuration of one part among those nested in a whole.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "configuration/fields.h"

namespace posembed::configuration {

/// The names on the way to a part, or to the text model: none where the whole is one.
std::vector<std::string> path_of(const Fields& fields, const std::optional<std::string>& part);

/// The file with keys where its configuration class looks for them.
Fields normalised(Fields fields);

/// A part, with the model_type that files of an older layout leave to the whole's.
Fields typed(const Fields& fields, const std::optional<std::string>& part);

}  // namespace posembed::configuration
