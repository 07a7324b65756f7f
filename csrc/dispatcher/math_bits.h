// torch's conjugate and negative bits: views such as x.conj() and x.conj().imag, whose memory
// differs from their values. torch's own rule expects that operators return what they write, which
// posembed's do not.
#pragma once

#include <torch/library.h>

#include <string>

namespace posembed::dispatcher {

/// Registers one rule for the operator of a schema: arguments that it reads are resolved; one that
/// it writes raises c10::ValueError, because a copy would be written instead.
void define_math_bits(torch::Library& library, const std::string& schema);

}  // namespace posembed::dispatcher
