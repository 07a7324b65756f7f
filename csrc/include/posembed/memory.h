// Memory of large CPU results and tables. The first touch of a new page costs more than the
// arithmetic that fills it, and malloc returns large freed blocks to the system, so posembed keeps
// some for reuse. Large tables are put in huge pages, which the TLB covers.
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

/// Limits the bytes that are kept, in the whole process; 0 keeps none. The default is the value of
/// the environment variable POSEMBED_CACHE_LIMIT. If it is not set, the default is 1/64 of the
/// memory that the process may use, at most 512 MiB, and 0 in a forked process. Returns the
/// previous limit.
///
/// Only memory of CPU results of 4 MiB and more is kept, and only if it came fresh from the system:
/// an allocator that reuses memory itself (jemalloc, tcmalloc) leaves nothing to keep.
/// @throws c10::ValueError `bytes` is negative
///
///     posembed::set_cache_limit(int64_t{1} << 30);
POSEMBED_API int64_t set_cache_limit(int64_t bytes);

/// Asks the system to keep a CPU tensor in huge pages, which speeds up reads of random rows.
/// posembed does so for its modules' tables, tables read from files, and results. For other
/// tensors, call it before the first value is written; otherwise the system moves their pages
/// later, in the background. Does nothing below 4 MiB, on other devices, without transparent huge
/// pages (Linux has them if /sys/kernel/mm/transparent_hugepage/enabled says `madvise` or
/// `always`), and if the environment variable POSEMBED_HUGE_PAGES is 0.
///
///     torch::Tensor table = torch::empty({50257, 768});
///     posembed::prefer_huge_pages(table);
///     table.normal_();
POSEMBED_API void prefer_huge_pages(const torch::Tensor& table);

}  // namespace posembed
