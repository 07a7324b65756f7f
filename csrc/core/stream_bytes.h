// The size from which kernels write past the caches.
#pragma once

#include <cstdint>

namespace posembed::core {

/// Outputs of this many bytes or more are streamed past the caches; smaller ones are likely to be
/// read from there soon. A larger threshold pays only while no other process uses the shared cache.
inline constexpr int64_t stream_bytes = int64_t{4} << 20;

}  // namespace posembed::core
