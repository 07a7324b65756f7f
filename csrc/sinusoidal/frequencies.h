// Frequencies and column layouts of sinusoidal encodings, as in the programs that models were
// trained with.
#pragma once

#include <cstdint>
#include <vector>

#include "core/double_double.h"
#include "sinusoidal/sinusoid.h"

namespace posembed::sinusoidal {

enum class Preset : int8_t {
  /// The paper's layout: interleaved, frequency base^(-2i / dim). An odd dim ends with a sine.
  vaswani,
  /// Marian, Pegasus: the same frequencies in halves. An odd dim has one more sine column.
  marian,
  /// tensor2tensor, "fairseq" and diffusion models ("ddpm"): halves, frequency
  /// base^(-i / (dim / 2 - 1)), from 1 to 1 / base inclusive. An odd dim ends with a zero.
  tensor2tensor,
};

/// The layout of a preset.
Layout layout_of(Preset preset, int64_t embedding_dim, bool cos_first);

/// The number of pairs in a row; a last column without a partner counts as a pair.
int64_t pairs_of(const Layout& layout);

/// The divisor of a pair's index in the exponent: dim / 2 - shift.
double divisor_of(Preset preset, int64_t embedding_dim, double shift);

/// base^(-i / divisor) for i in [0, pairs), in radians per position. The first is 1 for any
/// divisor.
std::vector<core::DoubleDouble> frequencies(double base, double divisor, int64_t pairs);

}  // namespace posembed::sinusoidal
