// A published file omits what the model's configuration class adds: kinds of layers, second bases,
// widths, defaults. Checks for a file alone, and for a file that its class has completed.
#pragma once

#include "configuration/fields.h"

namespace posembed::configuration {

/// Throws c10::ValueError for a file that, without its class, says less than the readers need.
void check_complete(const Fields& fields);

/// Throws c10::ValueError if the configuration class ignores numbers of the file.
void check_kept(const Fields& given, const Fields& completed);

}  // namespace posembed::configuration
