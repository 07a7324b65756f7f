#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "core/memory.h"

namespace posembed::core {
namespace {

constexpr int64_t mebibyte = int64_t{1} << 20;

/// A private mapping, unmapped at the end.
class Mapping {
 public:
  explicit Mapping(int64_t bytes)
      : bytes_(bytes),
        data_(mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    // Separates it from its neighbours; otherwise the system would list them as one mapping.
    mprotect(data_, 4096, PROT_READ);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { munmap(data_, static_cast<size_t>(bytes_)); }

  char* begin() const { return static_cast<char*>(data_) + 4096; }
  int64_t bytes() const { return bytes_ - 4096; }

 private:
  int64_t bytes_;
  void* data_;
};

/// Whether the system lists the page of `data` with the huge-page advice ("hg", proc(5)).
bool is_advised(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  std::ifstream list("/proc/self/smaps");
  bool inside = false;
  for (std::string line; std::getline(list, line);) {
    char* rest = nullptr;
    const uintptr_t begin = std::strtoull(line.c_str(), &rest, 16);
    if (rest != line.c_str() && *rest == '-') {
      inside = begin <= address && address < std::strtoull(rest + 1, nullptr, 16);
    } else if (inside && line.rfind("VmFlags:", 0) == 0) {
      return line.find(" hg") != std::string::npos;
    }
  }
  return false;
}

class HugePages : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists("/sys/kernel/mm/transparent_hugepage")) {
      GTEST_SKIP() << "this system has no transparent huge pages";
    }
  }
};

TEST_F(HugePages, AreAskedForWholePagesInsideTheMemory) {
  const Mapping mapping(16 * mebibyte);
  prefer_huge_pages(mapping.begin() + 100, 8 * mebibyte);
  EXPECT_FALSE(is_advised(mapping.begin())) << "the page is shared with other data";
  EXPECT_TRUE(is_advised(mapping.begin() + 4096));
  EXPECT_TRUE(is_advised(mapping.begin() + 8 * mebibyte - 1));
  EXPECT_FALSE(is_advised(mapping.begin() + 8 * mebibyte + 100));
}

TEST_F(HugePages, AreNotAskedForLittleMemory) {
  const Mapping mapping(16 * mebibyte);
  prefer_huge_pages(mapping.begin(), 4 * mebibyte - 1);
  EXPECT_FALSE(is_advised(mapping.begin()));
}

TEST(HugePagesDeathTest, AreNotAskedForWhereTheVariableForbidsThem) {
  const auto asks_for_none = [] {
    const Mapping mapping(16 * mebibyte);
    prefer_huge_pages(mapping.begin(), mapping.bytes());
    std::exit(is_advised(mapping.begin()) ? 1 : 0);
  };
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  setenv("POSEMBED_HUGE_PAGES", "0", 1);  // read when the library is loaded, in the new process
  EXPECT_EXIT(asks_for_none(), ::testing::ExitedWithCode(0), "");
  unsetenv("POSEMBED_HUGE_PAGES");
}

}  // namespace
}  // namespace posembed::core
