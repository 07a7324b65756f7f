// Long sums are divided into spans.
#pragma once

#include <cstdint>

namespace posembed::core {

/// Rows in a span. A sum adds the rows of each span, then the spans' sums in order. Long sums stay
/// accurate, and a CUDA device can add many spans in parallel and give the same bits as a CPU.
inline constexpr int64_t span = 64;

}  // namespace posembed::core
