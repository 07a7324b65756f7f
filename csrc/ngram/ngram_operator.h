// C++ calls of the n-gram operators, through the dispatcher as in Python.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "dispatcher/operator.h"
#include "posembed/ngram.h"

namespace posembed::dispatcher {

template <>
struct EnumArgument<NgramRule> {
  static constexpr const char* argument = "rule";
  static constexpr const char* names[] = {"xor", "rolling", "modular"};
};

/// Lists of numbers.
template <>
struct SchemaType<std::vector<int64_t>> {
  using Type = at::IntArrayRef;
  static Type to(const std::vector<int64_t>& field) { return field; }
  static std::vector<int64_t> from(Type value) { return value.vec(); }
};

}  // namespace posembed::dispatcher

namespace posembed::ngram {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

/// Arguments of ngram_ids after the ids, in the order of the schema.
struct Call : NgramSpec {
  Call() = default;
  /* implicit */ Call(NgramSpec spec) : NgramSpec(std::move(spec)) {}

  MaybeTensor history;     // int [batch, longest - 1]: the tokens before the ids
  MaybeTensor cu_seqlens;  // int [documents + 1]
  MaybeTensor mask;        // bool or int, as the ids: 0 for what is not text

  POSEMBED_FIELDS(self.multipliers(), self.moduli(), self.offsets(), self.sizes(), self.boundary(),
                  self.padding(), self.rule(), self.history, self.cu_seqlens, self.mask)
};

/// Rows of a table for the n-grams that end at each token.
inline const dispatcher::Operator<Tensor(const Tensor&), Call> ngram_ids{"ngram_ids"};

/// Bool, as the ids: which tokens come before the lengths [batch], or [] for ids [seq].
inline const dispatcher::Operator<Tensor(const Tensor&, const Tensor&)> ngram_mask{"ngram_mask"};

/// Throws unless `mask` is bool or integers in the shape of `ids`.
void check_mask(const Tensor& mask, const Tensor& ids);

/// count, vocab_size, layer, seed.
inline const dispatcher::Operator<std::vector<int64_t>(int64_t, int64_t, int64_t, int64_t)>
    ngram_multipliers{"ngram_multipliers"};

/// count, start, skip.
inline const dispatcher::Operator<std::vector<int64_t>(int64_t, int64_t, int64_t)> ngram_primes{
    "ngram_primes"};

/// The sizes of n-grams, ascending: those of the spec, or 2, 3, … as many as its numbers tell.
std::vector<int64_t> sizes_of(const NgramSpec& spec);

/// Throws c10::ValueError for numbers that do not fit together.
void check_spec(const NgramSpec& spec);

}  // namespace posembed::ngram
