// Where a configuration comes from: a file, a model's folder, or text.
#pragma once

#include <string>

#include "configuration/fields.h"

namespace posembed::configuration {

/// The configuration at a path or in a model's folder, or the one that JSON text is.
/// Throws c10::ValueError for a folder without configuration, and for a file that is no JSON;
/// std::filesystem::filesystem_error where there is no such file.
Fields load(const std::string& config);

}  // namespace posembed::configuration
