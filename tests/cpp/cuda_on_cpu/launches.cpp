// The launches of kernels, for tests of libposembed.so.
#include "launches.h"

#include <algorithm>

extern "C" [[gnu::visibility("default")]] int64_t posembed_launches() { return cuda_on_cpu::launches; }

/// The number of different kernels that were launched, of which the first `size` are written.
extern "C" [[gnu::visibility("default")]] int64_t posembed_kernels(const void** out, int64_t size) {
  const auto count = static_cast<int64_t>(cuda_on_cpu::kernels.size());
  std::copy_n(cuda_on_cpu::kernels.begin(), std::min(count, size), out);
  return count;
}
