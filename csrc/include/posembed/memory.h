// Memory of large CPU results and tables. The first touch of a new page costs more than the
// arithmetic that fills it, and malloc returns large blocks to the system at once; posembed keeps
// some to reuse. In large tables, finding a page costs as much as reading a row from it.
#pragma once

#include <torch/types.h>

#include <cstdint>

#include "posembed/export.h"

namespace posembed {

/// Returns the kept memory to the system, as torch.cuda.empty_cache() does on a device. Results in
/// use are not touched. Returns the number of bytes that were freed.
///
///     posembed::empty_cache();
POSEMBED_API int64_t empty_cache();

/// Limits the bytes that are kept, in the whole process; 0 keeps none. The default is 512 MiB, or
/// what the environment variable POSEMBED_CACHE_LIMIT says. Returns the previous limit.
///
/// Only CPU results of 4 MiB and more are kept, and only if their memory came fresh from the
/// system: with an allocator that reuses memory itself (jemalloc, tcmalloc), posembed keeps
/// nothing.
/// @throws c10::ValueError `bytes` is negative
///
///     posembed::set_cache_limit(int64_t{1} << 30);
POSEMBED_API int64_t set_cache_limit(int64_t bytes);

/// Asks the system to keep a CPU tensor in huge pages, where rows at random places are read half
/// again as fast. posembed does so for its modules' tables, tables read from files, and results. Of
/// other tensors call it before their first value is written; later the system moves them when it
/// finds the time. Does nothing below 4 MiB, on other devices, where the system has no transparent
/// huge pages (Linux has, where `madvise` or `always` stands in
/// /sys/kernel/mm/transparent_hugepage/enabled), and where the environment variable
/// POSEMBED_HUGE_PAGES is 0.
///
///     torch::Tensor table = torch::empty({50257, 768});
///     posembed::prefer_huge_pages(table);
///     table.normal_();
POSEMBED_API void prefer_huge_pages(const torch::Tensor& table);

}  // namespace posembed
