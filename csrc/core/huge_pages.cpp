#include "core/huge_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace posembed::core {
namespace {

#ifdef MADV_HUGEPAGE
/// Two huge pages: smaller blocks may not contain an aligned one.
constexpr int64_t min_bytes = int64_t{4} << 20;

bool is_wanted() {
  const char* text = std::getenv("POSEMBED_HUGE_PAGES");
  return text == nullptr || std::strcmp(text, "0") != 0;
}

const bool wanted = is_wanted();
#endif

}  // namespace

void prefer_huge_pages([[maybe_unused]] const void* data, [[maybe_unused]] int64_t bytes) {
#ifdef MADV_HUGEPAGE
  if (!wanted || bytes < min_bytes) return;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + page - 1) / page * page;
  const uintptr_t end = (address + static_cast<uintptr_t>(bytes)) / page * page;
  // If the system refuses (a kernel without huge pages), the memory does not change.
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace posembed::core
