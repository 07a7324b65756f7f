// Divides a CPU kernel's range among torch's threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>

namespace posembed::dispatcher {

/// Work on fewer bytes takes less time than waking a second thread.
inline constexpr int64_t bytes_per_task = 160 * 1024;

/// Calls `kernel(begin, end)` on parts of [0, count), or once on the calling thread if the work is
/// small.
template <typename Kernel>
void parallel_for(int64_t count, int64_t bytes_per_item, const Kernel& kernel) {
  const int64_t grain = std::max<int64_t>(1, bytes_per_task / std::max<int64_t>(1, bytes_per_item));
  if (count <= grain) {
    if (count > 0) kernel(int64_t{0}, count);
  } else {
    at::parallel_for(0, count, grain, kernel);
  }
}

}  // namespace posembed::dispatcher
