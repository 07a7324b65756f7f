// Decides whether two strided blocks of memory share an element. Addresses are a linear form of
// bounded indices, so this is a bounded linear Diophantine equation. Nested strides, which nearly
// all views have, leave only a few candidates to try.
#pragma once

#include <cstdint>

namespace posembed::core {

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
