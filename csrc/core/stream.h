// Non-temporal ("streaming") stores, for memory that is not read soon: they bypass the caches and
// save memory traffic, because they do not read a cache line before they write it. Software
// prefetch for sequential reads.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/macros.h"
#include "core/memory.h"
#include "core/vector.h"

namespace posembed::core {
inline namespace POSEMBED_ISA {

POSEMBED_INLINE bool is_aligned_to_vector(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % sizeof(Words) == 0;
}

/// Whether to write `rows` contiguous rows of `columns` elements of T at `out` with non-temporal
/// stores: if they would not stay in the caches and all are aligned.
template <typename T>
POSEMBED_INLINE bool streams_rows(const void* out, int64_t rows, int64_t columns) {
  const int64_t row_bytes = columns * int64_t{sizeof(T)};
  return rows * row_bytes >= stream_bytes && row_bytes % 64 == 0 && is_aligned_to_vector(out);
}

/// Bytes in a page of virtual memory.
inline constexpr int64_t page = 4096;

/// Loads the TLB entries of the pages that begin in the `bytes` at `out`, before these are
/// streamed. A store that misses the TLB stalls all later stores.
POSEMBED_INLINE void expect_stream(const void* out, int64_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(out);
  const uintptr_t end = begin + static_cast<uintptr_t>(bytes);
  for (uintptr_t at = (begin + page - 1) / page * page; at < end; at += page) {
    __builtin_prefetch(reinterpret_cast<const void*>(at), /*write=*/0, /*locality=*/0);
  }
}

/// Calls stream_vector(i) for each whole vector of the `bytes` at `out`, starting at byte `begin`;
/// returns the byte after the last.
template <typename StreamVector>
POSEMBED_INLINE int64_t stream_vectors(char* out, int64_t begin, int64_t bytes,
                                       const StreamVector& stream_vector) {
  constexpr int64_t width = sizeof(Words);
  int64_t done = begin;
  while (done + width <= bytes) {
    expect_stream(out + done + page, page);
    const int64_t stop = bytes - done < page ? bytes : done + page;
    for (; done + width <= stop; done += width) stream_vector(done);
  }
  return done;
}

/// memcpy with non-temporal stores. Call stream_fence() before another thread reads the copy.
POSEMBED_INLINE void stream_copy(void* out, const void* in, int64_t bytes) {
  constexpr int64_t width = sizeof(Words);
  char* to = static_cast<char*>(out);
  const char* from = static_cast<const char*>(in);
  int64_t done = -reinterpret_cast<intptr_t>(to) & (width - 1);
  if (done > bytes) done = bytes;
  memcpy(to, from, static_cast<size_t>(done));
  done = stream_vectors(to, done, bytes,
                        [=](int64_t i) { stream(load_vector<Words>(from + i), to + i); });
  memcpy(to + done, from + done, static_cast<size_t>(bytes - done));
}

/// memset to zero with non-temporal stores; see stream_copy().
POSEMBED_INLINE void stream_zeros(void* out, int64_t bytes) {
  constexpr int64_t width = sizeof(Words);
  char* to = static_cast<char*>(out);
  int64_t done = -reinterpret_cast<intptr_t>(to) & (width - 1);
  if (done > bytes) done = bytes;
  memset(to, 0, static_cast<size_t>(done));
  done = stream_vectors(to, done, bytes, [=](int64_t i) { stream(Words{}, to + i); });
  memset(to + done, 0, static_cast<size_t>(bytes - done));
}

/// Prefetches the `bytes` at `in` + `ahead`, because the hardware prefetcher stops at the end of a
/// page.
template <int64_t bytes, int64_t ahead = 1024>
POSEMBED_INLINE void prefetch_ahead(const void* in) {
  constexpr int64_t line = 64;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(in) + ahead;
  for (int64_t at = 0; at < bytes; at += line) {
    __builtin_prefetch(reinterpret_cast<const void*>(begin + static_cast<uintptr_t>(at)));
  }
}

}  // namespace POSEMBED_ISA
}  // namespace posembed::core
