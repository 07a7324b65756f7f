// When kernels write past the caches.
#pragma once

#include <cstdint>

namespace posembed::core {

/// Outputs from this size on are streamed past the caches; smaller ones are likely to be read from
/// them.
inline constexpr int64_t stream_bytes = int64_t{4} << 20;

}  // namespace posembed::core
