// The hash of an n-gram, one token at a time from the newest. All arithmetic wraps in 64 bits.
#pragma once

#include "core/divisor.h"
#include "ngram/kernel.h"

namespace posembed::ngram {

/// The hash of the tokens up to `back` places before the newest, from that of one token fewer.
/// Products: Cheng et al., "Conditional Memory via Scalable Lookup", arXiv:2601.07372. Rolling:
/// Pagnoni et al., "Byte Latent Transformer", arXiv:2412.09871.
template <bool rolling>
POSEMBED_INLINE uint64_t extended(const IdsArguments& a, uint64_t hash, int64_t token, int64_t back,
                                  int64_t head) {
  const auto word = static_cast<uint64_t>(token);
  if (rolling) return hash * a.multipliers[head] + word;
  return hash ^ word * a.multipliers[back];
}

/// The remainder of a signed number, not negative, as torch.remainder.
POSEMBED_INLINE int64_t floor_remainder(uint64_t hash, const core::Divisor<int64_t>& divisor) {
  const auto number = static_cast<int64_t>(hash);
  const int64_t negative = number >> 63;  // -1 or 0; ~x = -1 - x has the mirrored remainder
  const int64_t remainder = core::divide(number ^ negative, divisor).remainder;
  return (remainder ^ negative) + (divisor.value & negative);
}

}  // namespace posembed::ngram
