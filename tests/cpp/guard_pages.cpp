// An allocator of CPU tensors for tests: every block is next to a guard page, which faults when it
// is touched. tests/python/test_guard_pages.py loads it.
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>

namespace {

enum class Placement { none, before_guard, after_guard };

/// [guard page | room | guard page]
struct Pages {
  char* base = nullptr;
  size_t bytes = 0;
};

class GuardPages final : public c10::Allocator {
 public:
  explicit GuardPages(Placement placement) : placement_(placement) {}

  c10::DataPtr allocate(size_t size) override {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t room = (size + page - 1) / page * page, bytes = room + 2 * page;
    void* const base = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(base != MAP_FAILED, "no memory for ", bytes, " bytes");
    auto* const pages = new Pages{static_cast<char*>(base), bytes};
    char* const begin = pages->base + page;
    if (room > 0) mprotect(begin, room, PROT_READ | PROT_WRITE);
    const bool at_end = placement_ == Placement::before_guard;
    // Memory that is read before it is written differs between the placements: NaN or zeros.
    if (at_end) std::memset(begin, 0xff, room);
    return {begin + (at_end ? room - size : 0), pages, &release, c10::DeviceType::CPU};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static void release(void* context) {
    auto* const pages = static_cast<Pages*>(context);
    munmap(pages->base, pages->bytes);
    delete pages;
  }

  Placement placement_;
};

}  // namespace

/// Takes the memory of later tensors from torch's own allocator (0), or puts it before a guard page
/// (1) or after one (2).
extern "C" __attribute__((visibility("default"))) void place_tensors(int placement) {
  static GuardPages before(Placement::before_guard), after(Placement::after_guard);
  c10::Allocator* const allocators[] = {c10::GetDefaultCPUAllocator(), &before, &after};
  c10::SetCPUAllocator(allocators[placement]);
}
