// The host's memory: huge pages, what is large, and whether two blocks overlap.
#pragma once

#include <cstdint>

namespace posembed::core {

/// Kernels write outputs of this many bytes or more with non-temporal stores; smaller ones are
/// likely to be read from the caches soon. A larger threshold helps only while no other process
/// uses the shared cache (docs/guide/kernels.md).
inline constexpr int64_t stream_bytes = int64_t{4} << 20;

// -------------------------------------------------------------------------------------- huge pages
// The TLB covers a few thousand 4 KiB pages, so random rows of a large table miss it; a page of 2
// MiB needs one entry. Linux: Documentation/admin-guide/mm/transhuge.rst.

/// Asks the system for huge pages for memory that has not been touched yet. Does nothing below 4
/// MiB, if the system has no huge pages or forbids them, or if POSEMBED_HUGE_PAGES is 0.
void prefer_huge_pages(const void* data, int64_t bytes);

// ----------------------------------------------------------------------------------------- overlap
// Whether two strided blocks share an element. Addresses are a linear form of bounded indices, so
// this is a bounded linear Diophantine equation. Nested strides, which nearly all views have, leave
// only a few candidates to try.

/// Elements at address + item_size * sum(index[i] * stride[i]), 0 <= index[i] < size[i].
struct StridedMemory {
  uintptr_t address;
  int64_t item_size;
  const int64_t* size;
  const int64_t* stride;  // in elements, none negative
  int64_t rank;           // at most max_rank
};

inline constexpr int64_t max_rank = 8;

/// Whether an element of `a` and one of `b` share a byte. Exact, unless 100,000 candidates do not
/// decide; then true.
bool overlap(const StridedMemory& a, const StridedMemory& b);

/// Whether two different indices address the same element; as exact as overlap().
bool overlaps_itself(const StridedMemory& memory);

}  // namespace posembed::core
