// How long sums are divided.
#pragma once

#include <cstdint>

namespace posembed::core {

/// Rows are added in spans of this many, then the spans' sums in order. Long sums stay accurate,
/// and a CUDA device can work on many spans at once with the same bits as a CPU.
inline constexpr int64_t span = 64;

}  // namespace posembed::core
