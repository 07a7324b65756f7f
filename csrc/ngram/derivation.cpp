// Multipliers and moduli as Qwen's n-gram layers derive them from a few numbers: transformers,
// models/qwen4_exp. Steele et al., "Fast Splittable Pseudorandom Number Generators" (SplitMix64),
// OOPSLA 2014.
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "ngram/kernel.h"
#include "ngram/operator.h"

namespace posembed::ngram {
namespace {

constexpr uint64_t golden = 0x9e3779b97f4a7c15u;

uint64_t split_mix(uint64_t state) {
  state += golden;
  state = (state ^ state >> 30) * 0xbf58476d1ce4e5b9u;
  state = (state ^ state >> 27) * 0x94d049bb133111ebu;
  return state ^ state >> 31;
}

std::vector<int64_t> multipliers(int64_t count, int64_t vocab_size, int64_t layer, int64_t seed) {
  TORCH_CHECK_VALUE(count >= 1 && count <= max_multipliers, "count: expected 1 to ",
                    max_multipliers, ", got ", count);
  TORCH_CHECK_VALUE(vocab_size >= 1, "vocab_size: expected 1 or more, got ", vocab_size);
  TORCH_CHECK_VALUE(layer >= 0, "layer: expected 0 or more, got ", layer);
  // Odd, and so small that a token's product fits in 63 bits.
  const int64_t bound = std::numeric_limits<int64_t>::max() / vocab_size / 2;
  const auto half = static_cast<uint64_t>(std::max<int64_t>(1, bound));
  const uint64_t first = static_cast<uint64_t>(seed) + 10007u * static_cast<uint64_t>(layer);
  std::vector<int64_t> result;
  for (int64_t i = 1; i <= count; ++i) {
    const uint64_t random = split_mix(first + golden * static_cast<uint64_t>(i));
    result.push_back(static_cast<int64_t>(2 * (random % half) + 1));
  }
  return result;
}

bool is_prime(int64_t number) {
  if (number < 4) return number > 1;
  if (number % 2 == 0) return false;
  for (int64_t divisor = 3; divisor * divisor <= number; divisor += 2) {
    if (number % divisor == 0) return false;
  }
  return true;
}

std::vector<int64_t> primes(int64_t count, int64_t start, int64_t skip) {
  // Larger tables than this do not exist, and the search would be slow.
  constexpr int64_t most = int64_t{1} << 40;
  TORCH_CHECK_VALUE(count >= 0 && count <= max_columns, "count: expected 0 to ", max_columns,
                    ", got ", count);
  TORCH_CHECK_VALUE(start >= 0 && start <= most, "start: expected 0 to ", most, ", got ", start);
  TORCH_CHECK_VALUE(skip >= 0 && skip <= max_columns * max_columns, "skip: expected 0 to ",
                    max_columns * max_columns, ", got ", skip);
  std::vector<int64_t> result;
  for (int64_t number = start; static_cast<int64_t>(result.size()) < count; ++number) {
    if (is_prime(number) && skip-- <= 0) result.push_back(number);
  }
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(posembed, CompositeExplicitAutograd, m) {
  m.impl("ngram_multipliers", multipliers);
  m.impl("ngram_primes", primes);
}

}  // namespace posembed::ngram
