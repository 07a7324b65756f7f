// The tokens that an n-gram has before its last one: of the same document, then of the history.
#pragma once

#include "ngram/kernel.h"

namespace posembed::ngram {

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
