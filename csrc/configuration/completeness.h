// A published file leaves out what the model's configuration class adds: kinds of layers, second
// bases, widths, defaults. Checks of a file alone, and of a file that its class has completed.
#pragma once

#include "configuration/fields.h"

namespace posembed::configuration {

/// Throws c10::ValueError for a file that says less than the readers need without its class.
void check_complete(const Fields& fields);

/// Throws c10::ValueError for numbers of the file that its configuration class passes over.
void check_kept(const Fields& given, const Fields& completed);

}  // namespace posembed::configuration
