// The frequencies and column layouts of sinusoidal encodings, as the code bases that models come
// from have them.
#pragma once

#include <cstdint>
#include <vector>

#include "core/double_double.h"
#include "sinusoidal/sinusoid.h"

namespace posembed::sinusoidal {

enum class Preset : int8_t {
  /// The paper's: interleaved, frequency base^(-2i / dim). An odd dim ends with a sine.
  vaswani,
  /// Marian, Pegasus: the same frequencies in halves. An odd dim has one sine more than cosines.
  marian,
  /// tensor2tensor, fairseq, and diffusion models (there: ddpm): halves, frequency base^(-i / (dim
  /// / 2 - 1)),
  /// from 1 down to 1 / base inclusive. An odd dim ends with a zero.
  tensor2tensor,
};

/// The layout of a preset.
Layout layout_of(Preset preset, int64_t embedding_dim, bool cos_first);

/// Pairs in a row; where the last column has no partner, it counts as one.
int64_t pairs_of(const Layout& layout);

/// What divides a pair's number in the exponent: half the dim less `shift`.
double divisor_of(Preset preset, int64_t embedding_dim, double shift);

/// base^(-i / divisor) for i in [0, pairs), in radians per position. The first is 1 whatever the
/// divisor.
std::vector<core::DoubleDouble> frequencies(double base, double divisor, int64_t pairs);

}  // namespace posembed::sinusoidal
