// Loads a configuration from a file, a model's folder, or text.
#pragma once

#include <string>

#include "configuration/fields.h"

namespace posembed::configuration {

/// The configuration at a path, in a model's folder, or in JSON text. Throws c10::ValueError for a
/// folder without a configuration, and for a file that is not JSON or is shortened while it is
/// read; std::filesystem::filesystem_error if there is no such file.
Fields load(const std::string& config);

}  // namespace posembed::configuration
