// The output size from which kernels use non-temporal stores.
#pragma once

#include <cstdint>

namespace posembed::core {

/// Kernels write outputs of this many bytes or more with non-temporal stores; smaller ones are
/// likely to be read from the caches soon. A larger threshold helps only while no other process
/// uses the shared cache (docs/guide/kernels.md).
inline constexpr int64_t stream_bytes = int64_t{4} << 20;

}  // namespace posembed::core
