// The division of long sums into spans.
#pragma once

#include <cstdint>

namespace posembed::core {

/// The number of rows in a span. Rows are added within spans, then the spans' sums in order. Long
/// sums stay accurate, and a CUDA device can work on many spans at once with the same bits as a
/// CPU.
inline constexpr int64_t span = 64;

}  // namespace posembed::core
