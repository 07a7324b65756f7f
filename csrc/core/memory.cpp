#include "core/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>

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

// ----------------------------------------------------------------------------------------- overlap

namespace {

/// factor * x with 0 <= x <= max_x.
struct Term {
  int64_t factor, max_x;
};

/// A sum of terms, largest factor first, and the range that its remaining terms can reach.
class Sum {
 public:
  void add(int64_t factor, int64_t max_x) {
    if (factor == 0 || max_x == 0) return;
    const auto next = std::find_if(terms_, terms_ + count_,
                                   [=](const Term& term) { return term.factor <= factor; });
    if (next != terms_ + count_ && next->factor == factor) {
      next->max_x += max_x;
      return;
    }
    std::copy_backward(next, terms_ + count_, terms_ + count_ + 1);
    *next = {factor, max_x};
    ++count_;
  }

  /// Whether the terms can add up to `target`.
  bool can_be(int64_t target) {
    reach_[count_] = divisor_[count_] = 0;
    for (int64_t i = count_ - 1; i >= 0; --i) {
      reach_[i] = reach_[i + 1] + terms_[i].factor * terms_[i].max_x;
      divisor_[i] = std::gcd(divisor_[i + 1], terms_[i].factor);
    }
    candidates_ = 100000;
    return rest_can_be(0, target);
  }

 private:
  bool rest_can_be(int64_t i, int64_t target) {
    if (target < 0 || target > reach_[i]) return false;
    if (i == count_) return true;
    if (target % divisor_[i] != 0) return false;
    if (--candidates_ < 0) return true;
    const auto [factor, max_x] = terms_[i];
    const int64_t min_x = (std::max<int64_t>(target - reach_[i + 1], 0) + factor - 1) / factor;
    for (int64_t x = std::min(max_x, target / factor); x >= min_x; --x) {
      if (rest_can_be(i + 1, target - factor * x)) return true;
    }
    return false;
  }

  Term terms_[2 * max_rank + 1];  // of two blocks, and the parts of an element
  int64_t count_ = 0;
  int64_t reach_[2 * max_rank + 2], divisor_[2 * max_rank + 2];
  int64_t candidates_ = 0;
};

bool is_empty(const StridedMemory& memory) {
  return std::find(memory.size, memory.size + memory.rank, 0) != memory.size + memory.rank;
}

/// The distance from the first element to the last, in elements.
int64_t span(const StridedMemory& memory) {
  int64_t result = 0;
  for (int64_t i = 0; i < memory.rank; ++i) result += memory.stride[i] * (memory.size[i] - 1);
  return result;
}

/// Whether every stride steps over all elements that the smaller strides reach.
bool strides_nest(const StridedMemory& memory) {
  for (int64_t i = 0; i < memory.rank; ++i) {
    if (memory.size[i] == 1) continue;
    int64_t reach = 0;
    for (int64_t j = 0; j < memory.rank; ++j) {
      if (j == i || memory.stride[j] > memory.stride[i]) continue;
      reach += memory.stride[j] * (memory.size[j] - 1);
    }
    if (memory.stride[i] <= reach) return false;
  }
  return true;
}

}  // namespace

bool overlap(const StridedMemory& a, const StridedMemory& b) {
  if (is_empty(a) || is_empty(b)) return false;
  // Count in the largest unit that divides the element sizes and their distance.
  const auto bytes = static_cast<int64_t>(b.address - a.address);
  const int64_t unit = std::gcd(std::gcd(a.item_size, b.item_size), bytes);
  const int64_t a_item = a.item_size / unit, b_item = b.item_size / unit, distance = bytes / unit;
  const int64_t a_last = span(a) * a_item + a_item - 1, b_last = span(b) * b_item + b_item - 1;
  if (distance > a_last || -distance > b_last) return false;
  // Solve offset in a - offset in b = distance. Offsets in b are counted from its end, so that
  // every factor is positive.
  Sum sum;
  for (int64_t i = 0; i < a.rank; ++i) sum.add(a.stride[i] * a_item, a.size[i] - 1);
  for (int64_t i = 0; i < b.rank; ++i) sum.add(b.stride[i] * b_item, b.size[i] - 1);
  sum.add(1, a_item - 1);
  sum.add(1, b_item - 1);
  return sum.can_be(distance + b_last);
}

bool overlaps_itself(const StridedMemory& memory) {
  if (is_empty(memory) || strides_nest(memory)) return false;
  // Two different indices share an address if the form maps their difference to 0. Try each
  // dimension as the first where they differ, with a positive difference there. Other differences
  // are counted from their least, 1 - size.
  for (int64_t first = 0; first < memory.rank; ++first) {
    if (memory.size[first] == 1) continue;
    if (memory.stride[first] == 0) return true;
    Sum sum;
    for (int64_t i = 0; i < memory.rank; ++i) {
      sum.add(memory.stride[i], i == first ? memory.size[i] - 2 : 2 * (memory.size[i] - 1));
    }
    if (sum.can_be(span(memory) - memory.stride[first] * memory.size[first])) return true;
  }
  return false;
}

}  // namespace posembed::core
