// The n-gram kernels: each token and those before it are hashed to one row of a table for each size
// of n-gram and each head. Hashes wrap in 64 bits, and a modulus is a multiplication by its
// reciprocal, exact for all 64-bit numbers.
#pragma once

#include <cstdint>

#include "core/cuda_launch.h"
#include "core/divisor.h"
#include "core/index.h"
#include "core/instruction_set.h"

namespace posembed::ngram {

/// Limits that let the numbers of a specification be arguments of a CUDA kernel.
inline constexpr int64_t max_columns = 128, max_multipliers = 64;

/// How the tokens of an n-gram become one number, as posembed::NgramRule.
enum class Rule : int32_t { products, rolling, modular };

/// Kernels read vectors of numbers, of which the last may be past the end.
inline constexpr int64_t slack = 8;

/// out[b, s, c] = the hash of column c, modulo modulus[c], plus offset[c]. Column c is head c %
/// heads of the n-grams of size sizes[c / heads]. N-grams reach over what is not text, whose own
/// consist of padding.
struct IdsArguments {
  core::IndexView ids;         // [batch, seq]
  core::IndexView history;     // [history_rows, longest - 1]; data == nullptr: padding
  core::IndexView cu_seqlens;  // [documents + 1], in each row; data == nullptr: one document
  const bool* mask = nullptr;  // [batch, seq]: false for what is not text; null: all is
  int64_t* out = nullptr;      // [batch, seq, num_sizes * heads]
  int64_t batch = 0, seq = 0;
  int64_t documents = 1;     // of each row
  int64_t history_rows = 1;  // batch * documents, or documents if all rows have the same
  int64_t boundary = 0;
  int64_t padding = 0;  // the token before the first of a document, and before a boundary
  bool has_boundary = false;
  Rule rule = Rule::products;
  int32_t num_sizes = 0, heads = 0, longest = 0;
  int32_t sizes[max_multipliers];                 // ascending
  uint64_t multipliers[max_multipliers + slack];  // [longest] for products, else [heads]
  int64_t modulus[max_columns + slack];
  uint64_t inverse[max_columns + slack];  // as in core::Divisor
  int64_t offset[max_columns + slack];
};

/// The ids of tokens [begin, end) of batch * seq.
POSEMBED_CPU_KERNEL(hash_tokens, void(const IdsArguments& arguments, int64_t begin, int64_t end));

const char* hash_tokens_cuda(const IdsArguments& arguments, core::CudaStream stream);

// ------------------------------------------------------------------------------------------ window
// The tokens that an n-gram has before its last one: of the same document, then of the history.

/// The document of a token; a row is one document if there are no boundaries.
struct Document {
  int64_t index;
  int64_t begin, end;  // in its row
};

/// Stays within the row for any boundaries.
POSEMBED_INLINE Document document_of(const IdsArguments& a, int64_t at) {
  if (a.cu_seqlens.data == nullptr) return {0, 0, a.seq};
  int64_t low = 0, high = a.documents - 1;  // the last document that begins at or before `at`
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (read(a.cu_seqlens, middle) <= at) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int64_t begin = read(a.cu_seqlens, low), end = read(a.cu_seqlens, low + 1);
  return {low, begin < 0 ? 0 : (begin > at ? at : begin), end > at ? end : at + 1};
}

/// Whether token `token` of batch * seq is text.
POSEMBED_INLINE bool is_text(const IdsArguments& a, int64_t token) {
  return a.mask == nullptr || a.mask[token];
}

/// The token at a place of a row, which lies in the document's history if it is before its begin.
POSEMBED_INLINE int64_t token_at(const IdsArguments& a, const Document& document, int64_t row,
                                 int64_t place) {
  if (place >= document.begin) return read(a.ids, row * a.seq + place);
  if (a.history.data == nullptr) return a.padding;
  const int64_t width = a.longest - 1;
  const int64_t from = (row * a.documents + document.index) % a.history_rows;
  return read(a.history, from * width + width + place - document.begin);
}

/// Calls visit(back, token) for back = 1, …, longest - 1 with the text before token `at`. A
/// boundary ends the text before it, itself included.
template <typename Visit>
POSEMBED_INLINE void visit_before(const IdsArguments& a, const Document& document, int64_t row,
                                  int64_t at, int64_t longest, const Visit& visit) {
  bool ended = false;
  int64_t place = at;
  for (int64_t back = 1; back < longest; ++back) {
    --place;
    while (place >= document.begin && !is_text(a, row * a.seq + place)) --place;
    int64_t token = a.padding;
    if (!ended) {
      token = token_at(a, document, row, place);
      ended = a.has_boundary && token == a.boundary;
      if (ended) token = a.padding;
    }
    visit(back, token);
  }
}

}  // namespace posembed::ngram
