// Prefetches gaps between the rows that a kernel reads: values of a packed projection between
// tokens, and columns between heads that are not rotated. Some hardware prefetchers restart after a
// gap; fetching the gap keeps them going. Included only by kernel_cpu.cpp files.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/instruction_set.h"
#include "core/macros.h"
#include "rotary/angles_cpu.h"
#include "rotary/kernel.h"
#include "rotary/streaming_cpu.h"

namespace posembed::rotary::POSEMBED_ISA {
namespace {

/// Whether to prefetch gaps: for data larger than the caches, on processors other than Intel's.
template <typename T>
bool fetches_gaps(const Arguments& arguments) {
  int64_t elements = 0;
  for (int64_t r = 0; r < arguments.count; ++r) {
    elements += elements_of(arguments, arguments.views[r]);
  }
  return !core::is_intel && elements * static_cast<int64_t>(sizeof(T)) >= uncached_bytes;
}

/// Fetches the cache lines in [begin, end). Always inlined, because GCC drops calls of functions
/// that only prefetch.
POSEMBED_INLINE void fetch(const void* begin, const void* end) {
  constexpr uintptr_t line = 64;
  const auto stop = reinterpret_cast<uintptr_t>(end);
  for (auto at = reinterpret_cast<uintptr_t>(begin); at < stop; at += line) {
    __builtin_prefetch(reinterpret_cast<const void*>(at));
  }
}

/// Elements that a rotation reads of each head: in place, only the window.
inline int64_t read_of_head(const Arguments& arguments, const HeadView& view) {
  return view.in == view.out ? 2 * arguments.pairs : row_dim(arguments, view);
}

/// Elements between the part `read` of a head and that of the token's next head.
inline int64_t gap_between_heads(const HeadView& view, int64_t read) {
  return view.heads > 1 && view.in_stride[2] > read ? view.in_stride[2] - read : 0;
}

/// The gap between heads if it is worth prefetching, otherwise 0: wide gaps cost more than they
/// save.
template <typename T>
int64_t fetched_between_heads(const Arguments& arguments, const HeadView& view) {
  constexpr int64_t size = sizeof(T);
  const int64_t read = read_of_head(arguments, view), gap = gap_between_heads(view, read);
  const bool pays = gap * size <= std::clamp<int64_t>(read * size, 192, 256);
  return pays && fetches_gaps<T>(arguments) ? gap : 0;
}

template <typename T>
POSEMBED_INLINE const T* row_of(const HeadView& view, const Token& token, int64_t head) {
  return static_cast<const T*>(view.in) + offset_of(token, head, view.in_stride);
}

/// Prefetches the memory between a token's rows of tensor `r` and the rows that are read next,
/// unless it is too wide. The rows of the next tensor are read next; after the last tensor, those
/// of the token `next` in the first one. Call it only if gaps between heads, if any, are prefetched
/// too: after a gap that is not, the hardware prefetcher has stopped, and the call costs more than
/// it saves.
template <typename T>
POSEMBED_INLINE void fetch_behind_token(const Arguments& arguments, int64_t r, const Token& token,
                                        const Token& next) {
  constexpr uintptr_t widest = 8192;  // bytes
  const bool same_token = r + 1 < arguments.count;
  const HeadView &view = arguments.views[r], &next_view = arguments.views[same_token ? r + 1 : 0];
  const T* end = row_of<T>(view, token, view.heads - 1) + row_dim(arguments, view);
  const T* begin = row_of<T>(next_view, same_token ? token : next, 0);
  if (reinterpret_cast<uintptr_t>(begin) - reinterpret_cast<uintptr_t>(end) <= widest) {
    fetch(end, begin);
  }
}

}  // namespace
}  // namespace posembed::rotary::POSEMBED_ISA
