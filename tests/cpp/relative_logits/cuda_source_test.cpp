// Tests the source of the CUDA kernels, run on the CPU by tests/cpp/cuda_on_cpu: gathered logits
// have the bits of the CPU kernels where products have one type, sums agree with sums in float64,
// and rows outside the table are recorded. Needs no GPU.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

// Renamed, because the library may contain the real launchers.
#define gather_cuda gather_cuda_on_cpu
#define scatter_cuda scatter_cuda_on_cpu
#include "relative_logits/relative_logits_cuda.cu"

namespace posembed::relative_logits {
namespace {

constexpr int64_t row_count = 13;

enum class Rows { random, consecutive, clipped, columns };

/// A problem of 2 samples and 3 heads on 2 axes.
struct Problem {
  Problem(Rows kind, int64_t queries, int64_t keys, bool by_key)
      : places(by_key ? keys : queries), scores(static_cast<size_t>(6 * queries * keys)) {
    std::mt19937 generator(7);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < 4 * queries * keys; ++i) {
      const auto key = static_cast<int32_t>(i % keys), query = static_cast<int32_t>(i / keys % queries);
      const int32_t random = static_cast<int32_t>(generator() % (row_count + 2)) - 2;
      const int32_t shifted = (key - query + 1000 * row_count) % row_count;
      const int32_t clipped = std::clamp(key - query, -2, 2) + 2;
      rows.push_back(kind == Rows::random        ? random
                     : kind == Rows::consecutive ? shifted
                     : kind == Rows::clipped     ? clipped
                                                 : key % 5);
    }
    std::vector<Run> memory(static_cast<size_t>(keys));
    for (int64_t line = 0; line < (by_key ? 0 : 4 * queries); ++line) {
      int64_t count = 0;
      find_runs_cpu(rows.data() + line * keys, keys, memory.data(), count, lines.emplace_back());
      lines.back().runs.assign(memory.begin(), memory.begin() + count);
    }
    for (float& score : scores) score = normal(generator);
    products.resize(static_cast<size_t>(6 * places * row_count));
    for (float& product : products) product = normal(generator);
    block.rows = rows.data();
    block.row_stride[0] = 2 * queries * keys;
    block.row_stride[1] = queries * keys;
    block.row_stride[2] = keys;
    block.scores = scores.data();
    for (int64_t* stride : {block.score_stride, block.out_stride}) {
      stride[0] = 3 * queries * keys;
      stride[1] = queries * keys;
      stride[2] = keys;
    }
    block.row_count = row_count;
    block.axes = block.batch = 2;
    block.heads = 3;
    block.queries = queries;
    block.keys = keys;
    block.scale = 0.5;
    block.by_key = by_key;
  }

  /// The product that belongs to an element of rows, for a head.
  size_t product(int64_t at, int64_t head) const {
    const int64_t keys = block.keys, queries = block.queries;
    const int64_t key = at % keys, query = at / keys % queries, batch = at / keys / queries % 2;
    const int64_t place = (batch * 3 + head) * places + (block.by_key ? key : query);
    return static_cast<size_t>(place * row_count + rows[static_cast<size_t>(at)]);
  }

  int64_t places;
  std::vector<int32_t> rows;
  std::vector<QueryRows> lines;
  std::vector<float> scores, products;
  Block block;
};

/// Calls a CPU kernel, which takes one sample and head.
template <typename Kernel>
void on_planes(const Problem& problem, const Kernel& kernel) {
  const int64_t size = problem.block.row_stride[1];
  for (int64_t plane = 0; plane < 6; ++plane) {
    Block block = problem.block;
    block.rows += plane / 3 * size;
    if (!block.by_key) block.lines = problem.lines.data() + plane / 3 * block.queries;
    block.scores = static_cast<const float*>(block.scores) + plane * size;
    if (block.out != nullptr) block.out = static_cast<float*>(block.out) + plane * size;
    block.products = static_cast<float*>(block.products) + plane * problem.places * row_count;
    block.batch = block.heads = 1;
    kernel(block);
  }
}

template <typename Check>
void for_each_problem(const Check& check) {
  for (const Rows kind : {Rows::random, Rows::consecutive, Rows::clipped, Rows::columns}) {
    for (const int64_t keys : {1, 32, 75}) {
      for (const bool by_key : {false, true}) {
        SCOPED_TRACE(testing::Message() << static_cast<int>(kind) << " " << keys << " " << by_key);
        check(Problem(kind, 3, keys, by_key));
      }
    }
  }
}

TEST(RelativeLogitsGpuSource, GathersTheBitsOfTheCpuKernel) {
  for_each_problem([](Problem problem) {
    std::vector<float> expected(problem.scores.size()), found = expected;
    problem.block.products = problem.products.data();
    problem.block.out = expected.data();
    on_planes(problem, gather_cpu);
    problem.block.out = found.data();
    ASSERT_EQ(gather_cuda(problem.block, nullptr), nullptr);
    ASSERT_EQ(found, expected);
  });
}

TEST(RelativeLogitsGpuSource, SumsTheKeysOfRows) {
  for_each_problem([](Problem problem) {
    std::vector<double> expected(problem.products.size());
    const int64_t of_axis = problem.block.row_stride[0];
    for (int64_t at = 0; at < 2 * of_axis; ++at) {
      if (problem.rows[static_cast<size_t>(at)] < 0) continue;
      const int64_t plane = problem.block.row_stride[1], batch = at / plane % 2;
      for (int64_t head = 0; head < 3; ++head) {
        const int64_t score = (batch * 3 + head) * plane + at % plane;
        expected[problem.product(at, head)] += 0.5 * problem.scores[static_cast<size_t>(score)];
      }
    }
    for (const bool on_gpu : {false, true}) {
      std::vector<float> sums(problem.products.size());
      problem.block.products = sums.data();
      if (on_gpu) {
        ASSERT_EQ(scatter_cuda(problem.block, nullptr), nullptr);
      } else {
        on_planes(problem, scatter_cpu);
      }
      for (size_t i = 0; i < sums.size(); ++i) ASSERT_NEAR(sums[i], expected[i], 1e-5) << on_gpu;
    }
  });
}

TEST(RelativeLogitsGpuSource, RecordsARowOutsideTheTable) {
  for (const int32_t row : {-3, 13}) {
    Problem problem(Rows::clipped, 2, 40, false);
    problem.rows[45] = row;
    core::DeviceError error = {};
    problem.block.error = &error;
    problem.block.products = problem.products.data();
    std::vector<float> out(problem.scores.size());
    problem.block.out = out.data();
    ASSERT_EQ(gather_cuda(problem.block, nullptr), nullptr);
    EXPECT_EQ(error.state, 2u);
    EXPECT_EQ(error.value, row);
    EXPECT_EQ(error.index, 45);
  }
}

}  // namespace
}  // namespace posembed::relative_logits
