// Whether two strided blocks of memory share an element. Addresses are a bounded linear form of the
// indices, so the question is whether a bounded linear Diophantine equation has a solution; strides
// that nest, as those of views nearly always do, leave a handful of candidates to try.
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
/// decide it: then true.
bool overlap(const StridedMemory& a, const StridedMemory& b);

/// Whether two indices lead to the same element; as exact.
bool overlaps_itself(const StridedMemory& memory);

}  // namespace posembed::core
