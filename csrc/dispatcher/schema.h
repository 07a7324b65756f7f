// Families register schemas with TORCH_LIBRARY_FRAGMENT(posembed, m) in their schema.cpp. `spec` is
// the JSON text of a specification: numbers that no dtype cast can change. Lengths and offsets are
// SymInt, so that a compiled graph serves every length. Operators without tensor arguments take a
// device, as FakeTensorMode requires. "(a!)" marks a tensor that the operator writes to; such
// operators return nothing, which functionalization expects.
#pragma once

#include <torch/library.h>

#include <string>

#include "dispatcher/math_bits.h"

namespace posembed::dispatcher {

/// Defines an operator: its name and its arguments, then its result.
inline void define(torch::Library& library, const std::string& schema) {
  library.def(schema.c_str(), {at::Tag::pt2_compliant_tag});
  define_math_bits(library, schema);
}

}  // namespace posembed::dispatcher
