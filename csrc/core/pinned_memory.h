// Host memory that CUDA devices read and write.
#pragma once

#include <cstddef>

namespace posembed::core {

/// Zeroed, pinned memory, mapped into every device's address space. Null if CUDA cannot allocate
/// it. Exists in CUDA builds only.
void* allocate_pinned(std::size_t bytes);

/// Memory that was pinned where it is.
struct Pinned {
  void* on_device = nullptr;    // its address in the current device's kernels; null: not pinned
  bool owned = false;           // unpin() has to be called, as often as it was pinned
  const char* error = nullptr;  // why it was not pinned
};

/// Pins memory, unless it is, and maps it into every device's address space. Exists in CUDA builds
/// only.
Pinned pin(void* memory, std::size_t bytes);

/// Waits for the current device's kernels, which may still read the memory. The last call unpins.
void unpin(void* memory);

}  // namespace posembed::core
