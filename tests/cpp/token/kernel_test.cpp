// Compares the token kernels of every instruction set, and the source of the CUDA kernels, run on the CPU by
// tests/cpp/cuda_on_cpu, with plain loops; sums of the CUDA source have the bits of the CPU's. Needs no GPU.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

// Renamed, because the library may contain the real launchers.
#define gather_cuda gather_cuda_on_cpu
#define backward_cuda backward_cuda_on_cpu
#define backward_workspace_cuda backward_workspace_cuda_on_cpu
#include "copies.h"
#include "core/index.h"
#include "token/token_cuda.cu"
#include "values.h"

namespace posembed::token {
namespace {

constexpr int64_t start = 1000;  // of the part of a vocabulary

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

/// Ids [first, first + rows).
std::vector<int64_t> random_ids(int64_t count, int64_t rows, unsigned seed, int64_t first = 0) {
  std::mt19937_64 generator(seed);
  std::vector<int64_t> ids(static_cast<size_t>(count));
  for (int64_t& id : ids) id = first + static_cast<int64_t>(generator() % static_cast<uint64_t>(rows));
  return ids;
}

/// Memory at an offset from a cache line.
template <typename T>
class Shifted {
 public:
  Shifted(int64_t count, size_t shift)
      : count_(static_cast<size_t>(count)), memory_((count_ + shift) * sizeof(T) + 128, '\x5a') {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    begin_ = memory_.data() + (64 - address % 64) % 64 + shift * sizeof(T);
  }
  Shifted(const std::vector<T>& values, size_t shift) : Shifted(static_cast<int64_t>(values.size()), shift) {
    std::copy(values.begin(), values.end(), data());
  }
  Shifted(const Shifted&) = delete;
  Shifted& operator=(const Shifted&) = delete;
  T* data() { return reinterpret_cast<T*>(begin_); }

  bool is_clean_outside() const {
    const char* end = begin_ + count_ * sizeof(T);
    const auto poison = [](char byte) { return byte == 0x5a; };
    return std::all_of(memory_.data(), static_cast<const char*>(begin_), poison) &&
           std::all_of(end, memory_.data() + memory_.size(), poison);
  }

 private:
  size_t count_;
  std::vector<char> memory_;
  char* begin_;
};

template <typename T>
bool same_bits(const T* left, const std::vector<T>& right) {
  return right.empty() || std::memcmp(left, right.data(), right.size() * sizeof(T)) == 0;
}

template <typename T>
class TokenKernel : public testing::Test {};

using Scalars = testing::Types<float, double, core::BFloat16, core::Float16>;
TYPED_TEST_SUITE(TokenKernel, Scalars);

// ------------------------------------------------------------------------------------------ gather

using Gather = decltype(&baseline::gather);

void gather_source(const GatherArguments& arguments, int64_t, int64_t end) {
  if (end != arguments.count) return;  // launches take no range of ids
  ASSERT_EQ(gather_cuda(arguments, nullptr), nullptr);
}

struct Lookup {
  int64_t rows, dim, gap = 0;  // a row of the table ends `gap` elements before the next
  size_t shift = 0;            // of the table and of the result
  double scale = 1;
  bool has_holes = false, wide = true;
};

/// Looks up ids of a part of a vocabulary, in two pieces.
template <typename T>
void check_gather(const Lookup& problem, const std::vector<int64_t>& ids, const char* name, Gather gather) {
  const int64_t dim = problem.dim, stride = dim + problem.gap, count = static_cast<int64_t>(ids.size());
  const auto values = random_values<T>(problem.rows * stride, 1);
  const std::vector<int32_t> narrow(ids.begin(), ids.end());
  Shifted<T> weight(values, problem.shift), out(count * dim, problem.shift);
  std::vector<T> expected(out.data(), out.data() + count * dim);
  for (int64_t at = 0; at < count * dim; ++at) {
    const int64_t id = ids[static_cast<size_t>(at / dim)];
    T& element = expected[static_cast<size_t>(at)];
    if (problem.has_holes && id == hole) continue;
    element = T{};
    if (id < start || id >= start + problem.rows) continue;
    const T in = values[static_cast<size_t>((id - start) * stride + at % dim)];
    core::store(core::load(in) * static_cast<core::Compute<T>>(problem.scale), &element);
  }
  GatherArguments arguments;
  arguments.weight = weight.data();
  arguments.out = out.data();
  arguments.scalar = scalar_of<T>();
  arguments.rows = problem.rows;
  arguments.embedding_dim = dim;
  arguments.weight_stride = stride;
  if (problem.wide) arguments.ids = {ids.data(), core::Index::int64};
  if (!problem.wide) arguments.ids = {narrow.data(), core::Index::int32};
  arguments.count = count;
  arguments.first_row = -start;
  arguments.scale = problem.scale;
  arguments.has_holes = problem.has_holes;
  gather(arguments, 0, count / 2 + 1);
  gather(arguments, count / 2 + 1, count);
  ASSERT_TRUE(same_bits(out.data(), expected) && out.is_clean_outside())
      << name << " dim " << dim << " gap " << problem.gap << " shift " << problem.shift << " scale " << problem.scale;
}

/// A few ids, of which some are outside the part, at the edges of their type, or holes.
std::vector<int64_t> ids_of_part(int64_t rows, bool wide) {
  auto ids = random_ids(37, rows, 2, start);
  ids[0] = wide ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int32_t>::max();
  ids[1] = start - 1;
  ids[2] = start + rows;
  ids[3] = ids[29] = wide ? hole : std::numeric_limits<int32_t>::min();
  return ids;
}

TYPED_TEST(TokenKernel, Gathers) {
  for (const int64_t dim : {1, 7, 8, 64, 129, 300, 302, 520, 2055}) {
    for (const int64_t gap : {0, 3}) {
      for (const size_t shift : {0, 1, 2, 4}) {
        for (int bits = 0; bits < 8; ++bits) {
          const Lookup problem{50, dim, gap, shift, bits & 1 ? 27.7 : 1.0, (bits & 2) != 0, (bits & 4) != 0};
          const auto ids = ids_of_part(problem.rows, problem.wide);
          for (const Copy& copy : copies()) {
            ASSERT_NO_FATAL_FAILURE(check_gather<TypeParam>(problem, ids, copy.name, copy.gather));
          }
          ASSERT_NO_FATAL_FAILURE(check_gather<TypeParam>(problem, ids, "cuda source", gather_source));
        }
      }
    }
  }
}

/// Non-temporal stores.
TYPED_TEST(TokenKernel, GathersLargeOutputs) {
  const auto size = static_cast<int64_t>(sizeof(TypeParam));
  const auto ids = random_ids(9001, 60, 8, start - 10);
  for (const int64_t dim : {512 / size + 64, 640 / size + 1}) {
    for (const size_t shift : {0, 1}) {
      for (const double scale : {1.0, 2.5}) {
        for (const Copy& copy : copies()) {
          ASSERT_NO_FATAL_FAILURE(check_gather<TypeParam>({40, dim, 0, shift, scale}, ids, copy.name, copy.gather));
        }
      }
    }
  }
}

TEST(TokenGpuSource, RecordsIdsOutsideAndNoHoles) {
  const std::vector<float> weight(50 * 8);
  std::vector<int64_t> ids = ids_of_part(50, true);
  std::vector<float> out(ids.size() * 8);
  core::DeviceError error = {};
  GatherArguments arguments;
  arguments.weight = weight.data();
  arguments.out = out.data();
  arguments.rows = 50;
  arguments.embedding_dim = arguments.weight_stride = 8;
  arguments.ids = {ids.data(), core::Index::int64};
  arguments.count = static_cast<int64_t>(ids.size());
  arguments.first_row = -start;
  arguments.has_holes = true;
  arguments.error = &error;
  ASSERT_EQ(gather_cuda(arguments, nullptr), nullptr);
  EXPECT_EQ(error.state, 2u);
  EXPECT_LT(error.index, 3);
  EXPECT_EQ(error.value, ids[static_cast<size_t>(error.index)]);
  std::fill(ids.begin(), ids.begin() + 3, hole);
  error = {};
  ASSERT_EQ(gather_cuda(arguments, nullptr), nullptr);
  EXPECT_EQ(error.state, 0u);
}

/// The width that a launch chooses for rows of `dim` elements.
template <typename T>
int64_t chosen(int64_t dim, int64_t stride, int64_t shift = 0) {
  alignas(16) static T data[8];
  int64_t chosen = 0;
  core::visit_width<T>(core::width_of<T>(data + shift, dim, stride), [&](auto width) { chosen = width; });
  return chosen;
}

TEST(TokenGpuSource, WidthsOfVectors) {
  EXPECT_EQ(chosen<core::BFloat16>(304, 304), 8);
  EXPECT_EQ(chosen<core::BFloat16>(300, 300), 4);
  EXPECT_EQ(chosen<core::Float16>(302, 304), 2);
  EXPECT_EQ(chosen<core::Float16>(304, 301), 1);
  EXPECT_EQ(chosen<core::Float16>(301, 304), 1);
  EXPECT_EQ(chosen<core::BFloat16>(304, 304, 4), 4);
  EXPECT_EQ(chosen<core::BFloat16>(304, 304, 6), 2);
  EXPECT_EQ(chosen<core::BFloat16>(304, 304, 7), 1);
  EXPECT_EQ(chosen<float>(300, 300), 4);
  EXPECT_EQ(chosen<float>(302, 300), 2);
  EXPECT_EQ(chosen<float>(300, 300, 1), 1);
  EXPECT_EQ(chosen<double>(300, 300), 1);
}

// -------------------------------------------------------------------------------------------- sums

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

/// Sums of rows of `gradient` [count, dim] for each group.
template <typename T>
SumArguments sums_of(const Groups& sorted, const T* gradient, int64_t dim, T* out) {
  SumArguments arguments;
  arguments.gradient = gradient;
  arguments.out = out;
  arguments.scalar = scalar_of<T>();
  arguments.embedding_dim = dim;
  arguments.entries = sorted.entries.data();
  arguments.starts = sorted.starts.data();
  return arguments;
}

/// Half a unit in the last place of 1, or some of double's roundings.
template <typename T>
constexpr double unit = sizeof(T) == 8                     ? 1e-15
                        : sizeof(T) == 4                   ? 1e-6
                        : std::is_same_v<T, core::Float16> ? 6e-4
                                                           : 5e-3;

/// Compares sums of 20 rows, without row 7, in two pieces, with plain loops; `options` has what else is asked for.
template <typename T>
void check_sums(const std::vector<int64_t>& ids, const std::vector<T>& gradient, const SumArguments& options) {
  constexpr int64_t rows = 20, padding = 7;
  const int64_t dim = options.embedding_dim;
  const auto* factors = static_cast<const core::Compute<T>*>(options.sources.factors);
  std::vector<T> first;
  for (const Copy& copy : copies()) {
    const Groups sorted = group(copy, ids, rows, padding);
    std::vector<T> out(static_cast<size_t>(rows * dim), T{});
    SumArguments arguments = sums_of(sorted, gradient.data(), dim, out.data());
    arguments.sources = options.sources;
    arguments.scale = options.scale;
    arguments.scale_grad_by_freq = options.scale_grad_by_freq;
    copy.sum_groups(arguments, 0, sorted.groups / 2);
    copy.sum_groups(arguments, sorted.groups / 2, sorted.groups);
    for (int64_t at = 0; at < rows * dim; ++at) {
      double total = 0, magnitude = 0;
      int64_t times = 0;
      for (size_t index = 0; index < ids.size(); ++index) {
        if (ids[index] != at / dim || ids[index] == padding) continue;
        const size_t source = options.sources.rows == nullptr ? index : options.sources.rows[index];
        const double factor = factors == nullptr ? 1 : double{factors[index]};
        const double value = core::load(gradient[source * static_cast<size_t>(dim) + static_cast<size_t>(at % dim)]);
        total += factor * value;
        magnitude += std::abs(factor * value);
        ++times;
      }
      const double scale = options.scale / (options.scale_grad_by_freq && times > 0 ? static_cast<double>(times) : 1);
      ASSERT_NEAR(core::load(out[static_cast<size_t>(at)]), scale * total,
                  unit<T> * std::abs(scale * total) + (sizeof(T) == 8 ? 2e-15 : 1e-6) * scale * magnitude)
          << copy.name << " dim " << dim << " element " << at;
    }
    if (first.empty()) first = out;
    EXPECT_TRUE(same_bits(out.data(), first)) << copy.name << " differs from baseline";
  }
}

TYPED_TEST(TokenKernel, SumsEveryTouchedRow) {
  auto ids = random_ids(700, 20, 4);  // groups of about 35, and row 3 with more than one span
  for (size_t index = 0; index < 200; ++index) ids[index * 3] = 3;
  for (const int64_t dim : {1, 31, 32, 75}) {
    SumArguments options;
    options.embedding_dim = dim;
    options.scale = 0.5;
    options.scale_grad_by_freq = true;
    check_sums(ids, random_values<TypeParam>(700 * dim, 5), options);
  }
}

TYPED_TEST(TokenKernel, SumsRowsThatIdsShare) {
  auto ids = random_ids(400, 20, 13);
  for (size_t index = 0; index < 150; ++index) ids[index * 2] = 4;
  std::vector<uint32_t> sources;
  for (uint32_t index = 0; index < 400; ++index) sources.push_back(index * 11 / 400);
  const auto factors = random_values<core::Compute<TypeParam>>(400, 14);
  for (const int64_t dim : {1, 31, 75, 600}) {
    for (const bool weighted : {false, true}) {
      SumArguments options;
      options.embedding_dim = dim;
      options.sources = {sources.data(), weighted ? factors.data() : nullptr};
      check_sums(ids, random_values<TypeParam>(11 * dim, 15), options);
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
      std::vector<T> expected(static_cast<size_t>(rows * dim), T{});
      SumArguments sum = sums_of(sorted, gradient.data(), dim, expected.data());
      sum.scale = -0.5;
      copy.sum_groups(sum, 0, sorted.groups);
      const int64_t steps = rows + sorted.starts[static_cast<size_t>(sorted.groups)];
      for (const int64_t parts : {int64_t{1}, int64_t{2}, int64_t{7}, steps}) {
        for (const bool streaming : {false, true}) {
          for (const size_t shift : {0, 1}) {
            Shifted<T> out(rows * dim, shift);
            sum.out = out.data();
            sum.streaming = streaming;
            for (int64_t part = 0; part < parts; ++part) {
              copy.fill_table({sum, rows, sorted.groups}, steps * part / parts, steps * (part + 1) / parts);
            }
            ASSERT_TRUE(same_bits(out.data(), expected) && out.is_clean_outside())
                << copy.name << " dim " << dim << " in " << parts << " parts";
          }
        }
      }
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
        SumArguments arguments = sums_of(sorted, gradient.data(), dim, out.data());
        arguments.dense = false;
        arguments.streaming = streaming;
        copy.sum_groups(arguments, 0, sorted.groups);
        ASSERT_TRUE(out.is_clean_outside()) << copy.name;
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

// -------------------------------------------------------------------------------- the CUDA source

constexpr int64_t part_rows = 70;

/// Ids of a part of a vocabulary, and some outside it; one id occurs `often` times.
std::vector<int64_t> make_ids(int64_t count, int64_t often, bool outside) {
  auto ids = random_ids(count, part_rows - 9, 2, start);
  for (int64_t i = 0; i < often; ++i) ids[static_cast<size_t>(i * 5 % count)] = start + 33;
  if (outside) {
    ids[0] = std::numeric_limits<int64_t>::min();
    ids[1] = std::numeric_limits<int64_t>::max();
    ids[2] = start - 1;
    ids[3] = start + part_rows;
  }
  return ids;
}

/// The gradient of an embedding on the CPU.
template <typename T>
void sum_on_cpu(const BackwardArguments& a, const Groups& sorted, bool dense, T* out) {
  const Copy copy = copies().back();
  SumArguments sum = sums_of(sorted, static_cast<const T*>(a.gradient), a.embedding_dim, out);
  sum.sources = a.sources;
  sum.dense = dense;
  sum.scale = a.scale;
  sum.scale_grad_by_freq = a.scale_grad_by_freq;
  if (!dense) return copy.sum_groups(sum, 0, sorted.groups);
  const int64_t steps = a.num_embeddings + sorted.starts[static_cast<size_t>(sorted.groups)];
  copy.fill_table({sum, a.num_embeddings, sorted.groups}, 0, steps);
}

template <typename T>
void check_backward(const std::vector<int64_t>& ids, int64_t dim, size_t shift = 0, bool shares = false,
                    int64_t rows = part_rows) {
  const auto count = static_cast<int64_t>(ids.size());
  std::vector<uint32_t> sources;
  for (uint32_t index = 0; index < ids.size(); ++index) sources.push_back(index / 7);
  const auto factors = random_values<core::Compute<T>>(count, 14);
  auto values = random_values<T>(count * dim, 1);
  for (size_t i = 0; i < values.size(); i += 97) core::store(-0.0f, &values[i]);
  Shifted<T> gradient(values, shift);
  BackwardArguments arguments;
  arguments.gradient = gradient.data();
  if (shares) arguments.sources = {sources.data(), dim == 8 ? nullptr : factors.data()};
  arguments.scalar = scalar_of<T>();
  arguments.embedding_dim = dim;
  arguments.ids = {ids.data(), core::Index::int64};
  arguments.count = count;
  arguments.num_embeddings = rows;
  arguments.first_row = -start;
  arguments.padding_idx = start + 5;
  arguments.scale = -0.5;
  arguments.scale_grad_by_freq = dim % 2 == 0;
  const Groups sorted = group(copies().back(), ids, rows, arguments.padding_idx, -start);
  for (const auto& [dense, grouped] : {std::pair(true, true), {true, false}, {false, true}, {false, false}}) {
    std::vector<int64_t> row_ids(ids.size() + 1);
    arguments.row_ids = dense ? nullptr : row_ids.data();
    arguments.groups = &row_ids.back();
    Shifted<T> out((dense ? rows : count) * dim, 0);
    std::vector<T> expected(out.data(), out.data() + (dense ? rows : count) * dim);
    sum_on_cpu(arguments, sorted, dense, expected.data());
    arguments.out = out.data();
    arguments.workspace_bytes = workspace_of(arguments, grouped);
    std::vector<char> workspace(static_cast<size_t>(arguments.workspace_bytes), '\x5a');
    arguments.workspace = workspace.data();
    ASSERT_EQ(sum_rows(arguments, grouped, nullptr), nullptr);
    ASSERT_TRUE(same_bits(out.data(), expected) && out.is_clean_outside())
        << "dim " << dim << (dense ? " dense" : " rows") << (grouped ? " grouped" : " sorted");
    if (dense) continue;
    ASSERT_EQ(row_ids.back(), sorted.groups);
    ASSERT_TRUE(std::is_sorted(row_ids.begin(), row_ids.begin() + sorted.groups));
  }
}

TYPED_TEST(TokenKernel, GradientsOnGpus) {
  struct {
    int64_t dim;
    size_t shift;
  } shapes[] = {{1, 0}, {8, 0}, {8, 1}, {8, 2}, {8, 4}, {65, 0}, {134, 0}, {264, 0}, {300, 0}};
  for (const auto& [dim, shift] : shapes) {
    // Counts around the span: groups of one span, of slightly more, and of many.
    for (const int64_t often : {0, 64, 65, 200}) {
      const auto ids = make_ids(often == 0 ? 20 : 300, often, often != 65);
      ASSERT_NO_FATAL_FAILURE(check_backward<TypeParam>(ids, dim, shift)) << often;
      ASSERT_NO_FATAL_FAILURE(check_backward<TypeParam>(ids, dim, shift, /*shares=*/true)) << often;
    }
  }
}

TEST(TokenGpuSource, BackwardWhereSpansOfSeveralIdsBeginInAWindow) {
  std::vector<int64_t> ids;
  int64_t id = start;
  for (const int64_t size : {65, 65, 1, 129, 64, 66, 3, 128, 127, 65}) {
    for (int64_t i = 0; i < size; ++i) ids.push_back(id);
    ++id;
  }
  std::shuffle(ids.begin(), ids.end(), std::mt19937(3));
  for (const int64_t dim : {8, 264}) {
    ASSERT_NO_FATAL_FAILURE(check_backward<float>(ids, dim));
    ASSERT_NO_FATAL_FAILURE(check_backward<core::BFloat16>(ids, dim, 0, /*shares=*/true));
  }
}

TEST(TokenGpuSource, BackwardOfATableWithManyUntouchedRows) {
  std::mt19937_64 generator(4);
  for (const int64_t table : {32, 33, 700}) {
    for (const int64_t count : {1, 300}) {
      std::vector<int64_t> ids;
      for (int64_t i = 0; i < count; ++i) {
        const auto id = static_cast<int64_t>(generator() % static_cast<uint64_t>(table));
        ids.push_back(start + (i % 3 == 0 ? id : id % 7 + table / 2));
      }
      ASSERT_NO_FATAL_FAILURE(check_backward<core::BFloat16>(ids, 24, 0, false, table)) << count;
      ASSERT_NO_FATAL_FAILURE(check_backward<float>(ids, 3, 0, true, table)) << count;
    }
  }
}

TEST(TokenGpuSource, BackwardOfManyIds) {
  for (const int64_t often : {0, 2000}) {
    const auto ids = make_ids(5000, often, /*outside=*/true);
    ASSERT_NO_FATAL_FAILURE(check_backward<core::Float16>(ids, 8));
    std::vector<int64_t> spread = ids;
    for (size_t i = 0; i < spread.size(); i += 2) spread[i] = start + static_cast<int64_t>(i) * 2;
    ASSERT_NO_FATAL_FAILURE(check_backward<float>(spread, 2, 0, false, 12000));
  }
}

TEST(TokenGpuSource, BackwardOfMoreTilesThanAreCountedTwice) {
  auto ids = make_ids(max_recounted_tiles * tile_size + 5, 0, /*outside=*/true);
  for (size_t i = 0; i < ids.size(); i += 2) ids[i] = start + static_cast<int64_t>(i) / 3;
  ASSERT_NO_FATAL_FAILURE(check_backward<float>(ids, 1, 0, false, 6000));
}

/// Words of a text by Zipf's law, one id throughout, and ids that all occur more often than a span.
TEST(TokenGpuSource, BackwardOfIdsThatOccurOften) {
  std::mt19937_64 generator(5);
  std::vector<int64_t> words, same(3000, start + 9), hundreds;
  for (int i = 0; i < 4000; ++i) {
    const double share = double(generator() % 4096 + 1) / 4096;
    words.push_back(start + static_cast<int64_t>(std::pow(1000.0, share)) - 1);
    hundreds.push_back(start + i % 40);
  }
  std::shuffle(hundreds.begin(), hundreds.end(), generator);
  for (const auto& ids : {words, same, hundreds}) {
    ASSERT_NO_FATAL_FAILURE(check_backward<float>(ids, 8, 0, false, 1000));  // bits of each order
  }
}

TEST(TokenGpuSource, BackwardChoosesBySize) {
  BackwardArguments arguments;
  arguments.count = max_grouped_ids;
  arguments.num_embeddings = max_grouped_rows;
  EXPECT_TRUE(can_group(arguments));
  ++arguments.count;
  EXPECT_FALSE(can_group(arguments));
  arguments.count = 1;
  ++arguments.num_embeddings;
  EXPECT_FALSE(can_group(arguments));
}

TEST(TokenGpuSource, BackwardOfNothingKept) {
  check_backward<float>(std::vector<int64_t>(80, start + 5), 8);
  check_backward<core::BFloat16>(std::vector<int64_t>(200, start + 6), 8);
}

}  // namespace
}  // namespace posembed::token
