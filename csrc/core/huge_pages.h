// Huge pages. The TLB covers a few thousand 4 KiB pages, so random rows of a large table miss it; a
// page of 2 MiB needs one entry. Linux: Documentation/admin-guide/mm/transhuge.rst.
#pragma once

#include <cstdint>

namespace posembed::core {

/// Asks the system for huge pages for memory that has not been touched yet. Does nothing below 4
/// MiB, if the system has no huge pages or forbids them, or if POSEMBED_HUGE_PAGES is 0.
void prefer_huge_pages(const void* data, int64_t bytes);

}  // namespace posembed::core
