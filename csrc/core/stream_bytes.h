// When kernels write past the caches.
#pragma once

#include <cstdint>

namespace posembed::core {

/// Outputs of this many bytes or more are streamed past the caches; smaller ones are likely to be
/// read from there soon. Measured at 4, 16 and 64 MiB beside 32 MiB of shared last-level cache:
/// more than 4 is faster only while nobody else uses that cache, and otherwise takes twice the
/// time. At 6 MiB it depends on the past: rows gathered to memory that is still cached take half
/// the time through the caches, to memory that has left them nearly twice the time.
inline constexpr int64_t stream_bytes = int64_t{4} << 20;

}  // namespace posembed::core
