// Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as
// 1, 2, 3", 2011). An element's number depends only on the seed and the element's index, so any
// split of the work draws the same numbers, and a backward pass draws them again instead of storing
// them.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace posembed::core {

struct Random4 {
  uint32_t words[4];
};

/// Four random words for `counter` under `seed`.
POSEMBED_INLINE Random4 philox(uint64_t seed, uint64_t counter) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32);
  uint32_t c2 = 0, c3 = 0;
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c1 = static_cast<uint32_t>(product1);
    c3 = static_cast<uint32_t>(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

/// Drops elements with a given probability and scales the others so that the mean does not change.
struct Dropout {
  uint64_t seed = 0;
  uint32_t threshold = 0;  // an element is dropped if its word is below
  double scale = 1.0;      // of the elements kept; 0 if none is kept
};

POSEMBED_INLINE Dropout make_dropout(double probability, uint64_t seed) {
  const double scale = probability < 1.0 ? 1.0 / (1.0 - probability) : 0.0;
  const double threshold = probability * 0x1p32;
  return {seed, threshold < 0xffffffffu ? static_cast<uint32_t>(threshold) : 0xffffffffu, scale};
}

/// The factor of element `index`: 0 or `scale`. Four neighbours share one call of philox.
template <typename T>
POSEMBED_INLINE T dropout_factor(const Dropout& dropout, uint64_t index) {
  const uint32_t word = philox(dropout.seed, index >> 2).words[index & 3];
  return word < dropout.threshold ? T(0) : static_cast<T>(dropout.scale);
}

}  // namespace posembed::core
