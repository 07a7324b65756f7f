// Angles as PyTorch programs compute them: float32 frequencies times float32 positions, torch's
// sine and cosine. Models were trained with these; docs/guide/rotary_bits.md lists the programs.
#pragma once

#include <ATen/core/Tensor.h>

#include "rotary/arguments.h"

namespace posembed::rotary {

/// Radians per position as in transformers' ROPE_INIT_FUNCTIONS: float32 [pairs].
at::Tensor float32_frequencies(const RotarySpec& spec);

/// Sines and cosines of tokens.
struct AngleTables {
  at::Tensor cosines, sines;  // float32 [seq, pairs] or [batch, seq, pairs]
};

/// Computes the tables for numerics other than exact, and points `call` to them.
AngleTables use_tables(const Specification& spec, const Tensor& query, const Inputs& inputs,
                       Arguments* call);

}  // namespace posembed::rotary
