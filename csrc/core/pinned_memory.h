// Host memory that CUDA devices write while the host reads it.
#pragma once

#include <cstddef>

namespace posembed::core {

/// Zeroed, pinned, mapped into every device's address space. Null where CUDA gives none.
/// Exists in CUDA builds only.
void* allocate_pinned(std::size_t bytes);

}  // namespace posembed::core
