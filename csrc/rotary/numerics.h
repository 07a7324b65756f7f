// Angles as PyTorch programs compute them: float32 frequencies times float32 positions, torch's own
// sine and cosine. Models were trained with those; docs/guide/rotary_bits.md says who computes how.
#pragma once

#include <ATen/core/Tensor.h>

#include "rotary/arguments.h"

namespace posembed::rotary {

/// Radians per position as transformers' ROPE_INIT_FUNCTIONS give them: float32 [pairs].
at::Tensor float32_frequencies(const RotarySpec& spec);

/// Sines and cosines of tokens, and what keeps their memory.
struct AngleTables {
  at::Tensor cosines, sines;  // float32 [seq, pairs] or [batch, seq, pairs]
};

/// The tables that turn `call` by the specification's numerics, which are not exact; `call` then
/// points into them.
AngleTables use_tables(const Specification& spec, const Tensor& query, const Given& given,
                       Arguments* call);

}  // namespace posembed::rotary
