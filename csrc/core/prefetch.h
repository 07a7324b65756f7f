// Software prefetch for sequential reads.
#pragma once

#include <cstdint>

#include "core/instruction_set.h"
#include "core/macros.h"

namespace posembed::core {
inline namespace POSEMBED_ISA {

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
