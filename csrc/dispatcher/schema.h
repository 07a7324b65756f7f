// Families register schemas with TORCH_LIBRARY_FRAGMENT(posembed, m) in x_operator.cpp. `spec` is
// the JSON text of a specification: numbers that no dtype cast can change. Lengths and offsets are
// SymInt, so that a compiled graph serves every length. Operators without tensor arguments take a
// device, as FakeTensorMode requires. "(a!)" marks a tensor that the operator writes to; such
// operators return nothing, which functionalization expects.
#pragma once

#include <torch/library.h>

#include <string>

namespace posembed::dispatcher {

// torch's conjugate and negative bits: views such as x.conj() and x.conj().imag, whose memory
// differs from their values. torch's own rule expects that operators return what they write, which
// posembed's do not.

/// Registers one rule for the operator of a schema: arguments that it reads are resolved; one that
/// it writes raises c10::ValueError, because a copy would be written instead.
void define_math_bits(torch::Library& library, const std::string& schema);

/// Defines an operator: its name and its arguments, then its result.
inline void define(torch::Library& library, const std::string& schema) {
  library.def(schema.c_str(), {at::Tag::pt2_compliant_tag});
  define_math_bits(library, schema);
}

}  // namespace posembed::dispatcher
