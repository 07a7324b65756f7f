// Gaps between the rows that a kernel reads of one token and of the next, as the values of a packed
// projection leave. A prefetcher that follows one run of memory as fast as memory is starts anew
// behind a gap; fetching what lies there keeps it going. Included by kernel_cpu.cpp files only.
#pragma once

#include <cstdint>

#include "core/instruction_set.h"
#include "core/macros.h"
#include "rotary/angles_cpu.h"
#include "rotary/kernel.h"
#include "rotary/streaming_cpu.h"

namespace posembed::rotary::POSEMBED_ISA {
namespace {

/// Whether gaps are fetched. Measured on an AMD EPYC, for data that leaves the caches: queries and
/// keys of 32 + 8 heads before 8 heads of values take 0.4 (bfloat16) to 0.8 (float32) of the time.
template <typename T>
bool fetches_gaps(const Arguments& arguments) {
  int64_t elements = 0;
  for (int64_t r = 0; r < arguments.count; ++r) {
    elements += elements_of(arguments, arguments.rows[r]);
  }
  return !core::is_intel && elements * static_cast<int64_t>(sizeof(T)) >= streaming_bytes;
}

/// Fetches what lies between the `end` of what was read and what is read `next`; not gaps that are
/// wider than pays. Inline, because GCC drops calls of functions that do nothing but prefetch.
POSEMBED_INLINE void fetch_gap(const void* end, const void* next) {
  constexpr uintptr_t widest = 8192, line = 64;  // bytes
  const auto begin = reinterpret_cast<uintptr_t>(end), stop = reinterpret_cast<uintptr_t>(next);
  if (stop <= begin || stop - begin > widest) return;
  for (uintptr_t at = begin; at < stop; at += line) {
    __builtin_prefetch(reinterpret_cast<const void*>(at));
  }
}

template <typename T>
POSEMBED_INLINE const T* row_of(const Rows& rows, const Token& token, int64_t head) {
  return static_cast<const T*>(rows.in) + place_of(token, head, rows.in_stride);
}

/// Fetches the gap between the rows of tensor `r` of a token and what is read then: the next
/// tensor, or after the last one the next token.
template <typename T>
POSEMBED_INLINE void fetch_gap_behind(const Arguments& arguments, int64_t r, const Token& token) {
  const bool same_token = r + 1 < arguments.count;
  Token next = token;
  if (!same_token && ++next.seq == arguments.seq) next = {token.batch + 1, 0, false};
  const Rows &rows = arguments.rows[r], &next_rows = arguments.rows[same_token ? r + 1 : 0];
  fetch_gap(row_of<T>(rows, token, rows.heads - 1) + row_dim(arguments, rows),
            row_of<T>(next_rows, next, 0));
}

}  // namespace
}  // namespace posembed::rotary::POSEMBED_ISA
