// Memory of large CPU results. The first touch of a new page costs more than the arithmetic that
// fills it, and malloc returns large blocks to the system at once; posembed keeps some to reuse.
#pragma once

#include <cstdint>

#include "posembed/export.h"

namespace posembed {

/// Returns the kept memory to the system, as torch.cuda.empty_cache() does on a device. Results in
/// use are not touched. Returns the number of bytes that were freed.
///
///     posembed::empty_cache();
POSEMBED_API int64_t empty_cache();

/// Limits the bytes that are kept, in the whole process; 0 keeps none. The default is 512 MiB, or
/// the environment variable POSEMBED_CACHE_LIMIT. Returns the previous limit.
///
/// Only CPU results of 4 MiB and more are kept, and only if their memory came fresh from the
/// system: with an allocator that reuses memory itself (jemalloc, tcmalloc), posembed keeps
/// nothing.
/// @throws c10::ValueError `bytes` is negative
///
///     posembed::set_cache_limit(int64_t{1} << 30);
POSEMBED_API int64_t set_cache_limit(int64_t bytes);

}  // namespace posembed
