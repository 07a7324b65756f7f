// A thread hashes the n-gram of one column, so that a warp writes neighbouring ids.
#include "core/device_vector.h"
#include "core/divisor.h"
#include "ngram/ngram.h"

namespace posembed::ngram {

// -------------------------------------------------------------------------------------------- hash
// The hash of an n-gram, one token at a time from the newest. All arithmetic wraps in 64 bits.

/// The hash of the tokens up to `back` places before the newest, from that of one token fewer.
/// Products: Cheng et al., "Conditional Memory via Scalable Lookup", arXiv:2601.07372. Rolling:
/// Pagnoni et al., "Byte Latent Transformer", arXiv:2412.09871.
template <Rule rule>
POSEMBED_INLINE uint64_t extended(const IdsArguments& a, uint64_t hash, int64_t token, int64_t back,
                                  int64_t head) {
  const auto word = static_cast<uint64_t>(token);
  if (rule == Rule::rolling) return hash * a.multipliers[head] + word;
  return hash ^ word * a.multipliers[back];
}

/// The remainder of a signed number, not negative, as torch.remainder.
POSEMBED_INLINE int64_t floor_remainder(uint64_t hash, const core::Divisor<int64_t>& divisor) {
  const auto number = static_cast<int64_t>(hash);
  const int64_t negative = number >> 63;  // -1 or 0; ~x = -1 - x has the mirrored remainder
  const int64_t remainder = core::divide(number ^ negative, divisor).remainder;
  return (remainder ^ negative) + (divisor.value & negative);
}

/// The hash of tokens, newest first, whose highest power has the oldest one. Remainders are taken
/// at each step: powers do not wrap. Liu et al., "Scaling Embeddings Outperforms Scaling Experts in
/// Language Models" (LongCat), arXiv:2601.21204.
POSEMBED_INLINE uint64_t modular(const int64_t* tokens, int size, uint64_t multiplier,
                                 const core::Divisor<int64_t>& divisor) {
  uint64_t hash = 0;
  for (int back = size - 1; back > 0; --back) {
    hash += static_cast<uint64_t>(tokens[back]);
    hash = static_cast<uint64_t>(floor_remainder(hash, divisor)) * multiplier;
  }
  return hash + static_cast<uint64_t>(tokens[0]);
}

namespace {

// ------------------------------------------------------------------------------------------ kernel

using core::divide_up;
using core::threads;

template <Rule rule>
__global__ void __launch_bounds__(threads)
    hash_kernel(const __grid_constant__ IdsArguments a, core::Divisor<int64_t> columns,
                core::Divisor<int64_t> seq) {
  const int64_t item = int64_t{blockIdx.x} * threads + threadIdx.x;
  if (item >= a.batch * a.seq * columns.value) return;
  const auto place = core::divide(item, columns);
  const int64_t token = place.quotient;
  const auto [row, at] = core::divide(token, seq);
  const auto column = static_cast<int>(place.remainder);
  const IdsArguments& numbers = *core::through_data_cache(&a);
  const int size = numbers.sizes[column / a.heads], head = column % a.heads;

  const core::Divisor<int64_t> divisor{numbers.modulus[column], numbers.inverse[column]};

  uint64_t hash = 0;
  int64_t tokens[rule == Rule::modular ? max_multipliers : 1];
  const auto extend = [&](int64_t back, int64_t id) {
    if constexpr (rule == Rule::modular) {
      tokens[back] = id;
    } else {
      hash = extended<rule>(numbers, hash, id, back, head);
    }
  };
  if (is_text(a, token)) {
    extend(0, read(a.ids, token));
    visit_before(a, document_of(a, at), row, at, size, extend);
  } else {
    for (int back = 0; back < size; ++back) extend(back, a.padding);
  }
  if constexpr (rule == Rule::modular) {
    hash = modular(tokens, size, numbers.multipliers[head], divisor);
  }
  a.out[item] = floor_remainder(hash, divisor) + numbers.offset[column];
}

}  // namespace

const char* hash_tokens_cuda(const IdsArguments& arguments, core::CudaStream stream) {
  const int64_t columns = int64_t{arguments.num_sizes} * arguments.heads;
  const int64_t items = arguments.batch * arguments.seq * columns;
  if (items == 0) return nullptr;
  constexpr decltype(&hash_kernel<Rule::products>) kernels[] = {
      hash_kernel<Rule::products>, hash_kernel<Rule::rolling>, hash_kernel<Rule::modular>};
  core::launch(kernels[static_cast<int>(arguments.rule)], divide_up(items, threads), threads,
               stream, arguments, core::Divisor<int64_t>::of(columns),
               core::Divisor<int64_t>::of(arguments.seq));
  return core::launch_error();
}

}  // namespace posembed::ngram
