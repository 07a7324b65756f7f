// How long sums are cut.
#pragma once

#include <cstdint>

namespace posembed::core {

/// Rows are added in spans of this many, then the spans' sums in order: long sums stay accurate,
/// and a CUDA device can work on many spans of one sum at once, with the same bits as a CPU.
inline constexpr int64_t span = 64;

}  // namespace posembed::core
