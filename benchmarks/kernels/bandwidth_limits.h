// The limits of memory: the fastest copy and the fastest in-place update that we know, measured
// alongside a kernel as yardsticks. Fractions of memcpy mislead: it is slow between the cache and
// its own threshold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace posembed::benchmarks {

/// Copies `bytes` (a multiple of 16 KiB; 64-byte aligned).
using Copy = void (*)(const void* in, void* out, size_t bytes);

/// Reads, changes and writes `bytes` in place.
using Update = void (*)(void* data, size_t bytes);

/// Writes `bytes` (a multiple of 16 KiB; 64-byte aligned).
using Fill = void (*)(void* data, size_t bytes);

struct NamedCopy {
  const char* name;
  Copy run;
};

struct NamedUpdate {
  const char* name;
  Update run;
};

struct NamedFill {
  const char* name;
  Fill run;
};

/// memcpy, and with AVX-512 vector copies: with ordinary stores, with non-temporal stores, and with
/// non-temporal stores to four pages in parallel.
std::vector<NamedCopy> copies();

/// An ordinary loop, and with AVX-512 vector updates: sequential, with software prefetch, and four
/// pages in parallel.
std::vector<NamedUpdate> updates();

/// memset, and with AVX-512 non-temporal stores.
std::vector<NamedFill> fills();

}  // namespace posembed::benchmarks
