// Huge pages: 2 MiB of memory with one translation from virtual to physical addresses, where pages
// are 4 KiB otherwise. Rows at random places of a large table need one for each row, and caches for
// translations hold a few thousand. Linux: Documentation/admin-guide/mm/transhuge.rst.
#pragma once

#include <cstdint>

namespace posembed::core {

/// Asks the system for huge pages for memory that has not been touched yet. Does nothing below
/// 4 MiB, where a system has none or forbids them, and where POSEMBED_HUGE_PAGES is 0.
void prefer_huge_pages(const void* data, int64_t bytes);

}  // namespace posembed::core
