// Compares the token kernels with plain loops in double, on every instruction set of the processor.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "copies.h"
#include "core/index_range.h"
#include "token/token.h"
#include "values.h"

namespace posembed::token {
namespace {

using core::Scalar;

struct Copy {
  const char* name;
  decltype(&baseline::gather) gather;
  decltype(&baseline::group) group;
  decltype(&baseline::sum_groups) sum_groups;
  decltype(&baseline::fill_table) fill_table;
};

std::vector<Copy> copies() {
  std::vector<Copy> all;
  POSEMBED_ADD_COPIES(all, isa::gather, isa::group, isa::sum_groups, isa::fill_table)
  return all;
}

std::vector<int64_t> random_ids(int64_t count, int64_t rows, unsigned seed) {
  std::mt19937_64 generator(seed);
  std::vector<int64_t> ids(static_cast<size_t>(count));
  for (int64_t& id : ids) id = static_cast<int64_t>(generator() % static_cast<uint64_t>(rows));
  return ids;
}

template <typename T>
bool same_bits(const std::vector<T>& left, const std::vector<T>& right) {
  return left.size() == right.size() && std::memcmp(left.data(), right.data(), left.size() * sizeof(T)) == 0;
}

/// The sorted ids of one batch.
struct Groups {
  std::vector<uint64_t> entries, scratch;
  std::vector<int64_t> starts;
  int64_t groups = -1;
};

Groups group(const Copy& copy, const std::vector<int64_t>& ids, int64_t rows, int64_t padding_idx = -1,
             int64_t first_row = 0) {
  Groups result;
  result.entries.resize(ids.size());
  result.scratch.resize(ids.size());
  result.starts.resize(ids.size() + 1);
  GroupArguments arguments;
  arguments.ids = {ids.data(), core::Index::int64};
  arguments.count = static_cast<int64_t>(ids.size());
  arguments.num_embeddings = rows;
  arguments.first_row = first_row;
  arguments.padding_idx = padding_idx;
  arguments.entries = result.entries.data();
  arguments.scratch = result.scratch.data();
  arguments.starts = result.starts.data();
  arguments.groups = &result.groups;
  copy.group(arguments);
  return result;
}

template <typename T>
class TokenKernel : public testing::Test {};

using Scalars = testing::Types<float, double, core::BFloat16, core::Float16>;
TYPED_TEST_SUITE(TokenKernel, Scalars);

TYPED_TEST(TokenKernel, GathersRowsOfBothIndexTypes) {
  using T = TypeParam;
  for (const int64_t dim : {1, 7, 64, 129}) {
    const int64_t rows = 50, stride = dim + 3;
    const auto weight = random_values<T>(rows * stride, 1);
    const auto ids = random_ids(33, rows - 2, 2);
    const std::vector<int32_t> narrow(ids.begin(), ids.end());
    for (const Copy& copy : copies()) {
      for (const bool wide : {true, false}) {
        std::vector<T> out(ids.size() * static_cast<size_t>(dim));
        GatherArguments arguments;
        arguments.weight = weight.data();
        arguments.out = out.data();
        arguments.scalar = scalar_of<T>();
        arguments.rows = rows;
        arguments.embedding_dim = dim;
        arguments.weight_stride = stride;
        arguments.ids =
            wide ? core::IndexView{ids.data(), core::Index::int64} : core::IndexView{narrow.data(), core::Index::int32};
        arguments.count = static_cast<int64_t>(ids.size());
        arguments.first_row = 2;
        copy.gather(arguments, 0, 20);
        copy.gather(arguments, 20, arguments.count);
        for (size_t index = 0; index < ids.size(); ++index) {
          for (int64_t i = 0; i < dim; ++i) {
            const T expected = weight[static_cast<size_t>((ids[index] + 2) * stride + i)];
            ASSERT_EQ(
                std::memcmp(&out[index * static_cast<size_t>(dim) + static_cast<size_t>(i)], &expected, sizeof(T)), 0)
                << copy.name << " dim " << dim << " index " << index << " column " << i;
          }
        }
      }
    }
  }
}

TYPED_TEST(TokenKernel, LeavesHoles) {
  using T = TypeParam;
  const int64_t dim = 37;
  const auto weight = random_values<T>(5 * dim, 3);
  const std::vector<int64_t> ids{4, hole, -1, hole};
  for (const Copy& copy : copies()) {
    for (const bool has_holes : {true, false}) {
      const std::vector<T> before(4 * dim, weight[0]);
      std::vector<T> out = before;
      GatherArguments arguments;
      arguments.weight = weight.data();
      arguments.out = out.data();
      arguments.scalar = scalar_of<T>();
      arguments.rows = 5;
      arguments.embedding_dim = arguments.weight_stride = dim;
      arguments.ids = {ids.data(), core::Index::int64};
      arguments.count = 4;
      arguments.has_holes = has_holes;
      copy.gather(arguments, 0, 4);
      const size_t row = dim * sizeof(T);
      const std::vector<T> zeros(dim);
      const T* left = has_holes ? before.data() : zeros.data();
      EXPECT_EQ(std::memcmp(&out[0], &weight[4 * dim], row), 0) << copy.name;
      EXPECT_EQ(std::memcmp(&out[dim], left, row), 0) << copy.name;
      EXPECT_EQ(std::memcmp(&out[2 * dim], zeros.data(), row), 0) << copy.name;
      EXPECT_EQ(std::memcmp(&out[3 * dim], left, row), 0) << copy.name;
    }
  }
}

TYPED_TEST(TokenKernel, ScalesInComputeTypeAndRoundsOnce) {
  using T = TypeParam;
  const int64_t dim = 37;
  const auto weight = random_values<T>(5 * dim, 3);
  const std::vector<int64_t> ids{4, 0, 4};
  const double scale = std::sqrt(768.0);
  for (const Copy& copy : copies()) {
    std::vector<T> out(3 * dim);
    GatherArguments arguments;
    arguments.weight = weight.data();
    arguments.out = out.data();
    arguments.scalar = scalar_of<T>();
    arguments.rows = 5;
    arguments.embedding_dim = arguments.weight_stride = dim;
    arguments.ids = {ids.data(), core::Index::int64};
    arguments.count = 3;
    arguments.scale = scale;
    copy.gather(arguments, 0, 3);
    for (int64_t i = 0; i < 3 * dim; ++i) {
      const T input = weight[static_cast<size_t>(ids[static_cast<size_t>(i / dim)] * dim + i % dim)];
      T expected;
      core::store(core::load(input) * static_cast<core::Compute<T>>(scale), &expected);
      ASSERT_EQ(std::memcmp(&out[static_cast<size_t>(i)], &expected, sizeof(T)), 0) << copy.name << " at " << i;
    }
  }
}

/// Memory at an offset from a cache line.
template <typename T>
class Shifted {
 public:
  Shifted(int64_t count, size_t shift) : memory_(static_cast<size_t>(count) * sizeof(T) + 128) {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    begin_ = memory_.data() + (64 - address % 64) % 64 + shift;
    memset(memory_.data(), 0x5a, memory_.size());
  }
  T* data() { return reinterpret_cast<T*>(begin_); }

  /// Whether nothing around `count` elements was written.
  bool is_clean_outside(int64_t count) const {
    const char* end = begin_ + static_cast<size_t>(count) * sizeof(T);
    const auto poison = [](char byte) { return byte == 0x5a; };
    return std::all_of(memory_.data(), static_cast<const char*>(begin_), poison) &&
           std::all_of(end, memory_.data() + memory_.size(), poison);
  }

 private:
  std::vector<char> memory_;
  char* begin_;
};

/// Large outputs, aligned and unaligned, with ids from other parts of a vocabulary.
TYPED_TEST(TokenKernel, GathersLargeOutputsAndParts) {
  using T = TypeParam;
  const int64_t rows = 40, start = 1000;
  auto ids = random_ids(9001, rows + 20, 8);
  for (int64_t& id : ids) id += start - 10;
  ids[5] = std::numeric_limits<int64_t>::min();
  ids[6] = std::numeric_limits<int64_t>::max();
  const auto size = static_cast<int64_t>(sizeof(T));
  for (const int64_t dim : {512 / size + 64, 640 / size + 1}) {
    const auto weight = random_values<T>(rows * dim, 9);
    const auto count = static_cast<int64_t>(ids.size());
    for (const size_t shift : {size_t{0}, sizeof(T)}) {
      for (const double scale : {1.0, 2.5}) {
        for (const Copy& copy : copies()) {
          Shifted<T> out(count * dim, shift);
          GatherArguments arguments;
          arguments.weight = weight.data();
          arguments.out = out.data();
          arguments.scalar = scalar_of<T>();
          arguments.rows = rows;
          arguments.embedding_dim = arguments.weight_stride = dim;
          arguments.ids = {ids.data(), core::Index::int64};
          arguments.count = count;
          arguments.first_row = -start;
          arguments.scale = scale;
          copy.gather(arguments, 0, 4099);
          copy.gather(arguments, 4099, count);
          ASSERT_TRUE(out.is_clean_outside(count * dim)) << copy.name;
          for (int64_t at = 0; at < count * dim; ++at) {
            const int64_t id = ids[static_cast<size_t>(at / dim)];
            T expected{};
            if (id >= start && id < start + rows) {
              const T in = weight[static_cast<size_t>((id - start) * dim + at % dim)];
              core::store(core::load(in) * static_cast<core::Compute<T>>(scale), &expected);
            }
            ASSERT_EQ(std::memcmp(out.data() + at, &expected, sizeof(T)), 0)
                << copy.name << " dim " << dim << " element " << at;
          }
        }
      }
    }
  }
}

/// A whole table has the sums, and zeros elsewhere, for any division of the work, streamed or not.
TYPED_TEST(TokenKernel, FillsTables) {
  using T = TypeParam;
  const int64_t rows = 300, count = 400;
  auto ids = random_ids(count, rows - 20, 10);  // the last rows stay zeros
  for (size_t index = 0; index < 150; ++index) ids[index * 2] = 17;
  for (const int64_t dim : {int64_t{64}, int64_t{67}}) {
    const auto gradient = random_values<T>(count * dim, 11);
    for (const Copy& copy : copies()) {
      const Groups sorted = group(copy, ids, rows, /*padding_idx=*/3);
      SumArguments sum;
      sum.gradient = gradient.data();
      sum.scalar = scalar_of<T>();
      sum.embedding_dim = dim;
      sum.entries = sorted.entries.data();
      sum.starts = sorted.starts.data();
      sum.scale = -0.5;
      std::vector<T> expected(static_cast<size_t>(rows * dim), T{});
      sum.out = expected.data();
      copy.sum_groups(sum, 0, sorted.groups);
      const int64_t steps = rows + sorted.starts[static_cast<size_t>(sorted.groups)];
      for (const int64_t parts : {int64_t{1}, int64_t{2}, int64_t{7}, steps}) {
        for (const bool streaming : {false, true}) {
          for (const size_t shift : {size_t{0}, sizeof(T)}) {
            Shifted<T> out(rows * dim, shift);
            sum.out = out.data();
            sum.streaming = streaming;
            for (int64_t part = 0; part < parts; ++part) {
              copy.fill_table({sum, rows, sorted.groups}, steps * part / parts, steps * (part + 1) / parts);
            }
            ASSERT_TRUE(out.is_clean_outside(rows * dim)) << copy.name;
            ASSERT_EQ(std::memcmp(out.data(), expected.data(), expected.size() * sizeof(T)), 0)
                << copy.name << " dim " << dim << " in " << parts << " parts";
          }
        }
      }
    }
  }
}

TYPED_TEST(TokenKernel, SumsEveryTouchedRow) {
  using T = TypeParam;
  const int64_t rows = 20, count = 700;  // groups of about 35, and row 3 with more than one span
  auto ids = random_ids(count, rows, 4);
  for (size_t index = 0; index < 200; ++index) ids[index * 3] = 3;
  for (const int64_t dim : {1, 31, 32, 75}) {
    const auto gradient = random_values<T>(count * dim, 5);
    std::vector<T> first;
    for (const Copy& copy : copies()) {
      const Groups sorted = group(copy, ids, rows, /*padding_idx=*/7);
      std::vector<T> out(static_cast<size_t>(rows * dim), T{});
      SumArguments arguments;
      arguments.gradient = gradient.data();
      arguments.out = out.data();
      arguments.scalar = scalar_of<T>();
      arguments.embedding_dim = dim;
      arguments.entries = sorted.entries.data();
      arguments.starts = sorted.starts.data();
      arguments.scale = 0.5;
      arguments.scale_grad_by_freq = true;
      copy.sum_groups(arguments, 0, sorted.groups / 2);
      copy.sum_groups(arguments, sorted.groups / 2, sorted.groups);
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < dim; ++i) {
          double total = 0, magnitude = 0;
          int64_t times = 0;
          for (int64_t index = 0; index < count; ++index) {
            if (ids[static_cast<size_t>(index)] != row || row == 7) continue;
            const double value = core::load(gradient[static_cast<size_t>(index * dim + i)]);
            total += value;
            magnitude += std::abs(value);
            ++times;
          }
          if (times > 0) total *= 0.5 / static_cast<double>(times);
          const double unit = sizeof(T) == 8                     ? 1e-15
                              : sizeof(T) == 4                   ? 1e-6
                              : std::is_same_v<T, core::Float16> ? 6e-4
                                                                 : 5e-3;
          ASSERT_NEAR(core::load(out[static_cast<size_t>(row * dim + i)]), total,
                      unit * (std::abs(total) + 1e-2 * magnitude) + 1e-12)
              << copy.name << " dim " << dim << " row " << row << " column " << i;
        }
      }
      if (first.empty()) first = out;
      EXPECT_TRUE(same_bits(first, out)) << copy.name << " differs from baseline";
    }
  }
}

/// NaN, infinity and denormals do not change; nor does -0, except that a sum is never -0.
TYPED_TEST(TokenKernel, CopiesRowsThatAreAllOfTheirGroup) {
  using T = TypeParam;
  const double infinity = std::numeric_limits<double>::infinity();
  const core::Compute<T> special[] = {static_cast<core::Compute<T>>(std::nan("")),
                                      static_cast<core::Compute<T>>(-infinity), core::Compute<T>(-0.0),
                                      core::Compute<T>(0.0), core::Compute<T>(-1.5)};
  T denormal{};
  reinterpret_cast<unsigned char*>(&denormal)[0] = 3;  // the lowest bits
  const int64_t rows = 60, count = 41;                 // twice eight, eight, and nine rows more
  std::vector<int64_t> ids;
  for (int64_t index = 0; index < count; ++index) ids.push_back(index * 7 % rows);
  ids[40] = ids[0];  // one group of two
  for (const int64_t dim : {1, 7, 64, 129, 1100}) {
    auto gradient = random_values<T>(count * dim, 12);
    for (size_t i = 0; i < gradient.size(); ++i) {
      if (i % 8 < 5) core::store(special[i % 8], &gradient[i]);
      if (i % 8 == 5) gradient[i] = denormal;
    }
    for (const Copy& copy : copies()) {
      const Groups sorted = group(copy, ids, rows);
      for (const bool streaming : {false, true}) {
        Shifted<T> out(sorted.groups * dim, 0);
        SumArguments arguments;
        arguments.gradient = gradient.data();
        arguments.out = out.data();
        arguments.dense = false;
        arguments.streaming = streaming;
        arguments.scalar = scalar_of<T>();
        arguments.embedding_dim = dim;
        arguments.entries = sorted.entries.data();
        arguments.starts = sorted.starts.data();
        copy.sum_groups(arguments, 0, sorted.groups);
        ASSERT_TRUE(out.is_clean_outside(sorted.groups * dim)) << copy.name;
        for (int64_t number = 0; number < sorted.groups; ++number) {
          const uint64_t entry = sorted.entries[static_cast<size_t>(sorted.starts[static_cast<size_t>(number)])];
          if (ids[0] == static_cast<int64_t>(entry >> 32)) continue;
          for (int64_t i = 0; i < dim; ++i) {
            T expected = gradient[static_cast<size_t>(static_cast<int64_t>(entry & 0xffffffffu) * dim + i)];
            if (core::load(expected) == 0) expected = T{};
            ASSERT_EQ(std::memcmp(out.data() + number * dim + i, &expected, sizeof(T)), 0)
                << copy.name << " dim " << dim << " group " << number << " column " << i;
          }
        }
      }
    }
  }
}

TYPED_TEST(TokenKernel, SumsRowsThatIdsShare) {
  using T = TypeParam;
  using C = core::Compute<T>;
  const int64_t rows = 20, count = 400, shared = 11;
  auto ids = random_ids(count, rows, 13);
  for (size_t index = 0; index < 150; ++index) ids[index * 2] = 4;
  std::vector<uint32_t> sources;
  for (int64_t index = 0; index < count; ++index) {
    sources.push_back(static_cast<uint32_t>(index * shared / count));
  }
  const auto factors = random_values<C>(count, 14);
  for (const int64_t dim : {1, 31, 75, 600}) {
    const auto gradient = random_values<T>(shared * dim, 15);
    for (const bool weighted : {false, true}) {
      std::vector<T> first;
      for (const Copy& copy : copies()) {
        const Groups sorted = group(copy, ids, rows);
        std::vector<T> out(static_cast<size_t>(rows * dim), T{});
        SumArguments arguments;
        arguments.gradient = gradient.data();
        arguments.sources = {sources.data(), weighted ? factors.data() : nullptr};
        arguments.out = out.data();
        arguments.scalar = scalar_of<T>();
        arguments.embedding_dim = dim;
        arguments.entries = sorted.entries.data();
        arguments.starts = sorted.starts.data();
        copy.sum_groups(arguments, 0, sorted.groups);
        for (int64_t at = 0; at < rows * dim; ++at) {
          double total = 0, magnitude = 0;
          for (size_t index = 0; index < ids.size(); ++index) {
            if (ids[index] != at / dim) continue;
            const double value = core::load(gradient[static_cast<size_t>(sources[index] * dim + at % dim)]) *
                                 (weighted ? double{factors[index]} : 1.0);
            total += value;
            magnitude += std::abs(value);
          }
          const double unit = sizeof(T) == 8                     ? 1e-15
                              : sizeof(T) == 4                   ? 1e-6
                              : std::is_same_v<T, core::Float16> ? 6e-4
                                                                 : 5e-3;
          ASSERT_NEAR(core::load(out[static_cast<size_t>(at)]), total,
                      unit * std::abs(total) + (sizeof(T) == 8 ? 2e-15 : 1e-6) * magnitude)
              << copy.name << " dim " << dim << " element " << at;
        }
        if (first.empty()) first = out;
        EXPECT_TRUE(same_bits(first, out)) << copy.name << " differs from baseline";
      }
    }
  }
}

TEST(TokenKernelGroups, AreSortedByIdThenIndex) {
  for (const int64_t rows : {1, 2, 2048, 2049, 300000, 5000000}) {
    const auto ids = random_ids(5000, rows, 6);
    for (const Copy& copy : copies()) {
      const Groups sorted = group(copy, ids, rows);
      ASSERT_EQ(sorted.starts[static_cast<size_t>(sorted.groups)], 5000);
      for (size_t i = 0; i < sorted.entries.size(); ++i) {
        const auto index = static_cast<size_t>(sorted.entries[i] & 0xffffffffu);
        ASSERT_EQ(static_cast<int64_t>(sorted.entries[i] >> 32), ids[index]);
        if (i == 0) continue;
        ASSERT_LT(sorted.entries[i - 1], sorted.entries[i]) << copy.name << " rows " << rows;
      }
      for (int64_t number = 1; number < sorted.groups; ++number) {
        const auto begin = static_cast<size_t>(sorted.starts[static_cast<size_t>(number)]);
        ASSERT_NE(sorted.entries[begin] >> 32, sorted.entries[begin - 1] >> 32);
      }
    }
  }
}

TEST(TokenKernelGroups, LeaveOutPaddingAndMayBeEmpty) {
  for (const Copy& copy : copies()) {
    EXPECT_EQ(group(copy, {2, 2, 2}, 4, 2).groups, 0);
    EXPECT_EQ(group(copy, {}, 4).groups, 0);
    const Groups some = group(copy, {2, 1, 2, 3}, 4, 2);
    EXPECT_EQ(some.groups, 2);
    EXPECT_EQ(some.starts[2], 2);
  }
}

TEST(TokenKernelGroups, LeaveOutOtherPartsOfAVocabulary) {
  const int64_t low = std::numeric_limits<int64_t>::min();
  const int64_t high = std::numeric_limits<int64_t>::max();
  for (const int64_t start : {int64_t{7}, int64_t{1} << 62}) {
    const std::vector<int64_t> ids{start + 2, low, start - 1, start, high, start + 4, start + 1, start + 2};
    for (const Copy& copy : copies()) {
      const Groups sorted = group(copy, ids, 4, /*padding_idx=*/start + 1, /*first_row=*/-start);
      ASSERT_EQ(sorted.groups, 2) << copy.name;
      EXPECT_EQ(sorted.starts[2], 3);
      const std::vector<uint64_t> expected{3, uint64_t{2} << 32, uint64_t{2} << 32 | 7};
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), sorted.entries.begin()));
    }
  }
}

TEST(TokenKernelSum, TenThousandOnesInBfloat16AreNotLost) {
  const std::vector<int64_t> ids(10240, 1);
  core::BFloat16 one;
  core::store(1.0f, &one);
  const std::vector<core::BFloat16> gradient(10240 * 3, one);
  for (const Copy& copy : copies()) {
    const Groups sorted = group(copy, ids, 2);
    std::vector<core::BFloat16> out(3);
    SumArguments arguments;
    arguments.gradient = gradient.data();
    arguments.out = out.data();
    arguments.dense = false;
    arguments.scalar = Scalar::bfloat16;
    arguments.embedding_dim = 3;
    arguments.entries = sorted.entries.data();
    arguments.starts = sorted.starts.data();
    copy.sum_groups(arguments, 0, sorted.groups);
    for (const core::BFloat16& value : out) EXPECT_EQ(core::load(value), 10240.0f) << copy.name;
  }
}

TEST(IndexRange, FindsTheFirstValueOutside) {
  std::vector<int64_t> ids(2000, 5);
  const core::IndexView view{ids.data(), core::Index::int64};
  EXPECT_EQ(core::find_outside(view, 2000, 0, 6), -1);
  EXPECT_EQ(core::find_outside(view, 2000, 0, 5), 0);
  EXPECT_EQ(core::find_outside(view, 2000, 6, 9), 0);
  EXPECT_EQ(core::find_outside(view, 0, 0, 0), -1);
  for (const int64_t bad : {int64_t{-1}, int64_t{6}, std::numeric_limits<int64_t>::min(),
                            std::numeric_limits<int64_t>::max(), (int64_t{1} << 32) + 5}) {
    for (const size_t index : {size_t{0}, size_t{511}, size_t{512}, size_t{1999}}) {
      ids[index] = bad;
      EXPECT_EQ(core::find_outside(view, 2000, 0, 6), static_cast<int64_t>(index)) << bad;
      ids[index] = 5;
    }
  }
  ids[700] = -2;
  EXPECT_EQ(core::find_outside(view, 2000, -2, 6), -1);
  EXPECT_EQ(core::find_outside(view, 2000, -1, 6), 700);
}

}  // namespace
}  // namespace posembed::token
