// Memory of large CPU results and tables. Pages that are new to a process cost more than the
// arithmetic that fills them, and malloc gives large blocks back at once; posembed keeps some for
// its next results. Of tables, looking up a page costs as much as reading a row from it.
#pragma once

#include <torch/types.h>

#include <cstdint>

#include "posembed/export.h"

namespace posembed {

/// Gives the kept memory back, as torch::cuda's empty_cache does on a device. Results in use are
/// not touched. Returns the bytes that were given back.
///
///     posembed::empty_cache();
POSEMBED_API int64_t empty_cache();

/// How many bytes may be kept, for the whole process; 0 keeps none. 512 MiB without this call, or
/// what the environment variable POSEMBED_CACHE_LIMIT says. Returns the limit before.
///
/// Only results of 4 MiB and more on the CPU are kept, and only where their memory came fresh from
/// the system: an allocator that reuses memory by itself (jemalloc, tcmalloc) is left to it.
/// Raises c10::ValueError if `bytes` is negative.
///
///     posembed::set_cache_limit(int64_t{1} << 30);
POSEMBED_API int64_t set_cache_limit(int64_t bytes);

/// Asks the system to keep a CPU tensor in huge pages, where rows at random places are read half
/// again as fast. posembed does so for its modules' tables, tables read from files, and results. Of
/// other tensors call it before their first value is written; later the system moves them when it
/// finds the time. Does nothing below 4 MiB, on other devices, where the system has no transparent
/// huge pages (see core/huge_pages.h), and where the
/// environment variable POSEMBED_HUGE_PAGES is 0.
///
///     torch::Tensor table = torch::empty({50257, 768});
///     posembed::prefer_huge_pages(table);
///     table.normal_();
POSEMBED_API void prefer_huge_pages(const torch::Tensor& table);

}  // namespace posembed
