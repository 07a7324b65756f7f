// Host memory that CUDA devices write while the host reads it.
#pragma once

#include <cstddef>

namespace posembed::core {

/// Zeroed, pinned memory, mapped into every device's address space. Null if CUDA cannot allocate
/// it. Exists in CUDA builds only.
void* allocate_pinned(std::size_t bytes);

}  // namespace posembed::core
