// Tests the source of the CUDA kernels, run on the CPU by tests/cpp/cuda_on_cpu: every row has the
// bits of the CPU kernels, in vectors of every width, and nothing else is written. Needs no
// GPU.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

// Renamed, because the library may contain the real launchers.
#define gather_cuda gather_cuda_on_cpu
#define backward_cuda backward_cuda_on_cpu
#define backward_workspace_cuda backward_workspace_cuda_on_cpu
#include "token/token_cuda.cu"

namespace posembed::token {
namespace {

using core::Scalar;

constexpr Scalar scalars[] = {Scalar::float32, Scalar::float64, Scalar::bfloat16, Scalar::float16};
constexpr int64_t rows = 70, start = 1000;

/// Memory for numbers of any type, at an offset from a 16-byte boundary.
class Memory {
 public:
  Memory(int64_t count, Scalar scalar, int64_t shift)
      : bytes_(static_cast<size_t>((count + shift) * core::size_of(scalar)) + 16, '\x5a') {
    const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
    begin_ = (16 - address % 16) % 16 + static_cast<size_t>(shift * core::size_of(scalar));
  }
  void* data() { return bytes_.data() + begin_; }
  bool operator==(const Memory& other) const {
    return std::equal(bytes_.begin() + static_cast<int64_t>(begin_), bytes_.end(),
                      other.bytes_.begin() + static_cast<int64_t>(other.begin_), other.bytes_.end());
  }

 private:
  std::vector<char> bytes_;
  size_t begin_;
};

void fill_with_numbers(Memory* memory, int64_t count, Scalar scalar) {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  core::visit_scalar(scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    auto* values = static_cast<T*>(memory->data());
    for (int64_t i = 0; i < count; ++i) {
      store(static_cast<Compute<T>>(i % 97 == 0 ? -0.0f : normal(generator)), values + i);
    }
  });
}

/// Ids of a part of a vocabulary, and some outside it; one id occurs `often` times.
std::vector<int64_t> make_ids(int64_t count, int64_t often, bool outside) {
  std::mt19937_64 generator(2);
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < count; ++i) {
    ids.push_back(start + static_cast<int64_t>(generator() % static_cast<uint64_t>(rows - 9)));
  }
  for (int64_t i = 0; i < often; ++i) ids[static_cast<size_t>(i * 5 % count)] = start + 33;
  if (outside) {
    ids[0] = std::numeric_limits<int64_t>::min();
    ids[1] = std::numeric_limits<int64_t>::max();
    ids[2] = start - 1;
    ids[3] = start + rows;
  }
  return ids;
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

TEST(TokenGpuSource, Gather) {
  const auto ids = make_ids(37, 5, /*outside=*/true);
  const auto count = static_cast<int64_t>(ids.size());
  for (const Scalar scalar : scalars) {
    for (const int64_t dim : {1, 8, 64, 300, 302, 520, 2055}) {
      for (const int64_t shift : {0, 1, 2, 4}) {
        Memory weight(rows * dim, scalar, shift);
        fill_with_numbers(&weight, rows * dim, scalar);
        for (const double scale : {1.0, -2.5}) {
          Memory out(count * dim, scalar, 0), expected = out;
          core::DeviceError error = {};
          GatherArguments arguments;
          arguments.weight = weight.data();
          arguments.scalar = scalar;
          arguments.rows = rows;
          arguments.embedding_dim = arguments.weight_stride = dim;
          arguments.ids = {ids.data(), core::Index::int64};
          arguments.count = count;
          arguments.first_row = -start;
          arguments.scale = scale;
          arguments.out = expected.data();
          gather_cpu(arguments, 0, count);
          arguments.out = out.data();
          ASSERT_EQ(gather_cuda(arguments, nullptr), nullptr);
          ASSERT_TRUE(out == expected) << "dim " << dim;
          arguments.error = &error;
          gather_cuda(arguments, nullptr);
          ASSERT_EQ(error.state, 2u);
          ASSERT_EQ(error.value, ids[static_cast<size_t>(error.index)]);
          ASSERT_TRUE(error.value < start || error.value >= start + rows);
          // Holes keep what the two calls wrote before, and are no errors.
          std::vector<int64_t> some(ids.size(), hole);
          some[3] = start;
          arguments.ids = {some.data(), core::Index::int64};
          arguments.has_holes = true;
          core::DeviceError none = {};
          arguments.error = &none;
          arguments.out = expected.data();
          gather_cpu(arguments, 0, count);
          arguments.out = out.data();
          gather_cuda(arguments, nullptr);
          ASSERT_TRUE(out == expected) << "holes, dim " << dim;
          ASSERT_EQ(none.state, 0u);
        }
      }
    }
  }
}

/// Computes the gradient on the CPU; returns the number of rows.
int64_t expect(const BackwardArguments& a, bool dense, void* out) {
  std::vector<uint64_t> entries(static_cast<size_t>(a.count)), scratch = entries;
  std::vector<int64_t> starts(entries.size() + 1);
  int64_t groups = 0;
  GroupArguments group;
  group.ids = a.ids;
  group.count = a.count;
  group.num_embeddings = a.num_embeddings;
  group.first_row = a.first_row;
  group.padding_idx = a.padding_idx;
  group.entries = entries.data();
  group.scratch = scratch.data();
  group.starts = starts.data();
  group.groups = &groups;
  group_cpu(group);
  FillArguments fill;
  fill.rows = a.num_embeddings;
  fill.groups = groups;
  fill.sum.gradient = a.gradient;
  fill.sum.sources = a.sources;
  fill.sum.out = out;
  fill.sum.dense = dense;
  fill.sum.scalar = a.scalar;
  fill.sum.embedding_dim = a.embedding_dim;
  fill.sum.entries = entries.data();
  fill.sum.starts = starts.data();
  fill.sum.scale = a.scale;
  fill.sum.scale_grad_by_freq = a.scale_grad_by_freq;
  if (dense) {
    fill_table_cpu(fill, 0, a.num_embeddings + starts[static_cast<size_t>(groups)]);
  } else {
    sum_groups_cpu(fill.sum, 0, groups);
  }
  return groups;
}

/// Factors in the compute type of `scalar`, as bytes.
Memory make_factors(int64_t count, Scalar scalar) {
  const Scalar type = scalar == Scalar::float64 ? scalar : Scalar::float32;
  Memory factors(count, type, 0);
  fill_with_numbers(&factors, count, type);
  return factors;
}

void check_backward(Scalar scalar, const std::vector<int64_t>& ids, int64_t dim, int64_t shift, bool shares = false,
                    int64_t rows = token::rows) {
  const auto count = static_cast<int64_t>(ids.size());
  std::vector<uint32_t> sources;
  for (int64_t index = 0; index < count; ++index) {
    sources.push_back(static_cast<uint32_t>(index / 7));
  }
  Memory factors = make_factors(count, scalar);
  Memory gradient(count * dim, scalar, shift);
  fill_with_numbers(&gradient, count * dim, scalar);
  BackwardArguments arguments;
  arguments.gradient = gradient.data();
  if (shares) arguments.sources = {sources.data(), dim == 8 ? nullptr : factors.data()};
  arguments.scalar = scalar;
  arguments.embedding_dim = dim;
  arguments.ids = {ids.data(), core::Index::int64};
  arguments.count = count;
  arguments.num_embeddings = rows;
  arguments.first_row = -start;
  arguments.padding_idx = start + 5;
  arguments.scale = -0.5;
  arguments.scale_grad_by_freq = dim % 2 == 0;
  for (const auto& [dense, grouped] : {std::pair(true, true), {true, false}, {false, true}, {false, false}}) {
    std::vector<int64_t> row_ids(ids.size() + 1);
    arguments.row_ids = dense ? nullptr : row_ids.data();
    arguments.groups = &row_ids.back();
    const int64_t held = dense ? rows : count;
    Memory out(held * dim, scalar, 0), expected = out;
    const int64_t groups = expect(arguments, dense, expected.data());
    arguments.out = out.data();
    arguments.workspace_bytes = workspace_of(arguments, grouped);
    std::vector<char> workspace(static_cast<size_t>(arguments.workspace_bytes), '\x5a');
    arguments.workspace = workspace.data();
    ASSERT_EQ(sum_rows(arguments, grouped, nullptr), nullptr);
    ASSERT_TRUE(out == expected) << "dim " << dim << (dense ? " dense" : " rows") << (grouped ? " grouped" : " sorted");
    if (dense) continue;
    ASSERT_EQ(row_ids.back(), groups);
    ASSERT_TRUE(std::is_sorted(row_ids.begin(), row_ids.begin() + groups));
  }
}

TEST(TokenGpuSource, Backward) {
  struct {
    int64_t dim, shift;
  } shapes[] = {{1, 0}, {8, 0}, {8, 1}, {8, 2}, {8, 4}, {65, 0}, {134, 0}, {264, 0}, {300, 0}};
  for (const Scalar scalar : scalars) {
    for (const auto& [dim, shift] : shapes) {
      // Counts around the span: groups of one span, of slightly more, and of many.
      for (const int64_t often : {0, 64, 65, 200}) {
        const auto ids = make_ids(often == 0 ? 20 : 300, often, often != 65);
        ASSERT_NO_FATAL_FAILURE(check_backward(scalar, ids, dim, shift)) << often;
        ASSERT_NO_FATAL_FAILURE(check_backward(scalar, ids, dim, shift, /*shares=*/true)) << often;
      }
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
    ASSERT_NO_FATAL_FAILURE(check_backward(Scalar::float32, ids, dim, 0));
    ASSERT_NO_FATAL_FAILURE(check_backward(Scalar::bfloat16, ids, dim, 0, /*shares=*/true));
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
      ASSERT_NO_FATAL_FAILURE(check_backward(Scalar::bfloat16, ids, 24, 0, false, table)) << count;
      ASSERT_NO_FATAL_FAILURE(check_backward(Scalar::float32, ids, 3, 0, true, table)) << count;
    }
  }
}

TEST(TokenGpuSource, BackwardOfManyIds) {
  for (const int64_t often : {0, 2000}) {
    const auto ids = make_ids(5000, often, /*outside=*/true);
    ASSERT_NO_FATAL_FAILURE(check_backward(Scalar::float16, ids, 8, 0));
    std::vector<int64_t> spread = ids;
    for (size_t i = 0; i < spread.size(); i += 2) spread[i] = start + static_cast<int64_t>(i) * 2;
    ASSERT_NO_FATAL_FAILURE(check_backward(Scalar::float32, spread, 2, 0, false, 12000));
  }
}

TEST(TokenGpuSource, BackwardOfMoreTilesThanAreCountedTwice) {
  auto ids = make_ids(max_recounted_tiles * tile_size + 5, 0, /*outside=*/true);
  for (size_t i = 0; i < ids.size(); i += 2) ids[i] = start + static_cast<int64_t>(i) / 3;
  ASSERT_NO_FATAL_FAILURE(check_backward(Scalar::float32, ids, 1, 0, false, 6000));
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
    ASSERT_NO_FATAL_FAILURE(check_backward(Scalar::float32, ids, 8, 0, false, 1000));  // bits of each order
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
  check_backward(Scalar::float32, std::vector<int64_t>(80, start + 5), 8, 0);
  check_backward(Scalar::bfloat16, std::vector<int64_t>(200, start + 6), 8, 0);
}

}  // namespace
}  // namespace posembed::token
