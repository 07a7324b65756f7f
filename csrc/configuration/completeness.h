// A check for a file that the model's own configuration class has completed.
#pragma once

#include "configuration/fields.h"

namespace posembed::configuration {

/// Throws c10::ValueError if the configuration class ignores numbers of the file.
void check_kept(const Fields& given, const Fields& completed);

}  // namespace posembed::configuration
