// Compares the bag kernels of every instruction set, and the source of the CUDA kernels, run on the
// CPU by tests/cpp/cuda_on_cpu, with plain loops in double, and with each other bit for bit.
#include <cuda_runtime.h>

// Renamed, because the library may contain the real launchers.
#define pool_cuda pool_cuda_on_cpu
#define spread_cuda spread_cuda_on_cpu
#define find_bags_cuda find_bags_cuda_on_cpu
#define dot_cuda dot_cuda_on_cpu
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "bag/bag_cuda.cu"
#include "copies.h"
#include "values.h"

namespace posembed::bag {
namespace {

using core::Index;

struct Variant {
  const char* name;
  void (*pool)(const PoolArguments&, int64_t, int64_t);
  void (*find_bags)(const FindArguments&, int64_t, int64_t);
  void (*spread)(const SpreadArguments&, int64_t, int64_t);
  void (*dot)(const DotArguments&, int64_t, int64_t);
};

void pool_on_gpu(const PoolArguments& arguments, int64_t, int64_t) {
  ASSERT_EQ(pool_cuda(arguments, nullptr), nullptr);
}
void find_bags_on_gpu(const FindArguments& arguments, int64_t, int64_t) {
  ASSERT_EQ(find_bags_cuda(arguments, nullptr), nullptr);
}
void spread_on_gpu(const SpreadArguments& arguments, int64_t, int64_t) {
  ASSERT_EQ(spread_cuda(arguments, nullptr), nullptr);
}
void dot_on_gpu(const DotArguments& arguments, int64_t, int64_t) { ASSERT_EQ(dot_cuda(arguments, nullptr), nullptr); }

std::vector<Variant> variants() {
  std::vector<Variant> result;
  POSEMBED_ADD_COPIES(result, isa::pool, isa::find_bags, isa::spread, isa::dot)
  result.push_back({"cuda source", pool_on_gpu, find_bags_on_gpu, spread_on_gpu, dot_on_gpu});
  return result;
}

constexpr int64_t rows = 37, padding = 5;

/// Bags of all kinds: empty, with one id, longer than a span.
template <typename T>
struct Problem {
  explicit Problem(int64_t dim, int64_t padding = 3) : dim(dim), stride(dim + padding) {
    std::mt19937 generator(static_cast<unsigned>(dim));
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < offsets.back() + 11; ++i) ids.push_back(static_cast<int32_t>(generator() % rows));
    const auto fill = [&](int64_t count) {
      std::vector<T> values(static_cast<size_t>(count));
      for (T& value : values) core::store(static_cast<core::Compute<T>>(normal(generator)), &value);
      return values;
    };
    table = fill(rows * stride);
    gradient = fill(bags() * dim);
    weights = fill(count());
  }

  int64_t count() const { return static_cast<int64_t>(ids.size()); }
  int64_t bags() const { return static_cast<int64_t>(offsets.size()); }
  Bags view() const {
    Bags bags;
    bags.ids = {ids.data(), Index::int32};
    bags.offsets = {offsets.data(), Index::int64};
    bags.count = count();
    bags.bags = this->bags();
    bags.padding_idx = padding;
    return bags;
  }
  double row(int64_t index, int64_t column) const {
    const auto at = static_cast<size_t>(ids[static_cast<size_t>(index)] * stride + column);
    return core::load(table[at]);
  }
  bool counts(int64_t index) const { return ids[static_cast<size_t>(index)] != padding; }
  int64_t end(int64_t bag) const { return bag + 1 == bags() ? count() : offsets[static_cast<size_t>(bag + 1)]; }

  int64_t dim, stride;
  std::vector<int64_t> offsets = {0, 0, 1, 140, 140, 143};
  std::vector<int32_t> ids;
  std::vector<T> table, gradient, weights;
};

/// The tolerance for a sum of 140 terms of size 1 in float32 or float64, including its rounding.
template <typename T>
double tolerance(double expected) {
  if constexpr (std::is_same_v<T, double>) return 1e-13;
  const double half = std::is_same_v<T, core::Float16> ? 0x1p-11 : std::is_same_v<T, core::BFloat16> ? 0x1p-8 : 0x1p-24;
  return 2e-5 + half * std::abs(expected);
}

template <typename T>
bool same_bits(const std::vector<T>& left, const std::vector<T>& right) {
  return std::memcmp(left.data(), right.data(), left.size() * sizeof(T)) == 0;
}

template <typename T>
class BagKernel : public testing::Test {};

using Scalars = testing::Types<float, double, core::BFloat16, core::Float16>;
TYPED_TEST_SUITE(BagKernel, Scalars);

/// The pooled element of a bag in double.
template <typename T>
double pooled(const Problem<T>& problem, Mode mode, bool weighted, int64_t bag, int64_t column) {
  double sum = 0, greatest = 0;
  int64_t kept = 0;
  for (int64_t p = problem.offsets[static_cast<size_t>(bag)]; p < problem.end(bag); ++p) {
    if (!problem.counts(p)) continue;
    const double value = problem.row(p, column);
    sum += value * (weighted ? core::load(problem.weights[static_cast<size_t>(p)]) : 1.0);
    greatest = kept == 0 ? value : std::max(greatest, value);
    ++kept;
  }
  if (mode == Mode::max) return greatest;
  return mode == Mode::mean && kept > 0 ? sum / static_cast<double>(kept) : sum;
}

template <typename T>
void check_pool(const Problem<T>& problem) {
  const int64_t dim = problem.dim;
  for (const Mode mode : {Mode::sum, Mode::mean, Mode::max}) {
    for (const bool weighted : {false, true}) {
      if (weighted && mode != Mode::sum) continue;
      std::vector<T> first;
      std::vector<int64_t> first_indices;
      for (const Variant& variant : variants()) {
        std::vector<T> out(static_cast<size_t>(problem.bags() * dim));
        std::vector<int64_t> max_indices(out.size(), -2);
        PoolArguments arguments;
        arguments.table = problem.table.data();
        arguments.weights = weighted ? problem.weights.data() : nullptr;
        arguments.out = out.data();
        arguments.max_indices = max_indices.data();
        arguments.scalar = scalar_of<T>();
        arguments.mode = mode;
        arguments.rows = rows;
        arguments.embedding_dim = dim;
        arguments.table_stride = problem.stride;
        arguments.bags = problem.view();
        variant.pool(arguments, 0, problem.bags());
        if (first.empty()) first = out, first_indices = max_indices;
        EXPECT_TRUE(same_bits(out, first)) << variant.name << " dim " << dim;
        EXPECT_EQ(max_indices, first_indices) << variant.name << " dim " << dim;
        for (int64_t i = 0; i < problem.bags() * dim; ++i) {
          const auto at = static_cast<size_t>(i);
          const double expected = pooled(problem, mode, weighted, i / dim, i % dim);
          ASSERT_NEAR(core::load(out[at]), expected, tolerance<T>(expected)) << variant.name << " element " << i;
          if (mode == Mode::max && max_indices[at] >= 0) {
            ASSERT_EQ(core::load(out[at]), problem.row(max_indices[at], i % dim));
            ASSERT_TRUE(problem.counts(max_indices[at]));
          }
        }
      }
    }
  }
}

TYPED_TEST(BagKernel, PoolsBagsOfAllKinds) {
  // On CUDA: bags share a warp or not, with and without 16-byte accesses.
  for (const int64_t dim : {1, 5, 8, 24, 64, 200, 300, 302, 520}) {
    for (const int64_t padding : {3, 4, 8}) check_pool(Problem<TypeParam>(dim, padding));
  }
}

TYPED_TEST(BagKernel, LeavesPaddingWithAnInfiniteWeightOut) {
  Problem<TypeParam> problem(8, 8);
  problem.ids[0] = padding;
  core::store(std::numeric_limits<core::Compute<TypeParam>>::infinity(), problem.weights.data());
  check_pool(problem);
}

TYPED_TEST(BagKernel, GradientOfAMaximumGoesToItsIdAlone) {
  using T = TypeParam;
  const int64_t dim = 5, bag = 4, first = 140;  // bag 4 has the indices 140 to 142, bag 3 has none
  const Problem<T> problem(dim);
  std::vector<int64_t> max_indices(problem.gradient.size(), -1);
  for (int64_t i = 0; i < dim; ++i) max_indices[static_cast<size_t>(bag * dim + i)] = first + i % 3;
  for (const Variant& variant : variants()) {
    std::vector<T> out(static_cast<size_t>(problem.count() * dim));
    SpreadArguments arguments;
    arguments.gradient = problem.gradient.data();
    arguments.max_indices = max_indices.data();
    arguments.out = out.data();
    arguments.scalar = scalar_of<T>();
    arguments.embedding_dim = dim;
    arguments.bags = problem.view();
    variant.spread(arguments, 0, problem.count());
    for (int64_t p = 0; p < problem.count(); ++p)
      for (int64_t i = 0; i < dim; ++i) {
        const double whole = core::load(problem.gradient[static_cast<size_t>(bag * dim + i)]);
        ASSERT_EQ(core::load(out[static_cast<size_t>(p * dim + i)]), p == first + i % 3 ? whole : 0.0)
            << variant.name << " index " << p;
      }
  }
}

TYPED_TEST(BagKernel, DotsAreTheGradientsOfWeights) {
  using T = TypeParam;
  for (const int64_t dim : {1, 5, 64, 200, 300}) {
    const Problem<T> problem(dim, dim == 5 ? 3 : 8);
    for (const Variant& variant : variants()) {
      std::vector<T> out(static_cast<size_t>(problem.count()));
      DotArguments arguments;
      arguments.gradient = problem.gradient.data();
      arguments.table = problem.table.data();
      arguments.out = out.data();
      arguments.scalar = scalar_of<T>();
      arguments.rows = rows;
      arguments.embedding_dim = dim;
      arguments.table_stride = problem.stride;
      arguments.bags = problem.view();
      variant.dot(arguments, 0, problem.count());
      for (int64_t bag = 0; bag < problem.bags(); ++bag)
        for (int64_t p = problem.offsets[static_cast<size_t>(bag)]; p < problem.end(bag); ++p) {
          double expected = 0;
          for (int64_t i = 0; problem.counts(p) && i < dim; ++i) {
            expected += core::load(problem.gradient[static_cast<size_t>(bag * dim + i)]) * problem.row(p, i);
          }
          ASSERT_NEAR(core::load(out[static_cast<size_t>(p)]), expected, tolerance<T>(expected))
              << variant.name << " index " << p;
        }
    }
  }
}

TEST(BagKernelIds, KnowTheirBags) {
  const Problem<float> problem(1);
  Bags even = problem.view();
  even.size = 11;
  even.bags = even.count / even.size;
  for (const Variant& variant : variants()) {
    std::vector<uint32_t> found(problem.ids.size(), 99);
    variant.find_bags({found.data(), problem.view()}, 0, 100);
    if (variant.find_bags != find_bags_on_gpu) {
      variant.find_bags({found.data(), problem.view()}, 100, problem.count());
    }
    for (int64_t bag = 0; bag < problem.bags(); ++bag)
      for (int64_t p = problem.offsets[static_cast<size_t>(bag)]; p < problem.end(bag); ++p)
        ASSERT_EQ(found[static_cast<size_t>(p)], bag) << variant.name << " index " << p;
    variant.find_bags({found.data(), even}, 0, problem.count());
    for (size_t p = 0; p < found.size(); ++p) ASSERT_EQ(found[p], p / 11) << variant.name;
  }
}

PoolArguments pool_of(Problem<float>& problem, std::vector<float>& out, core::DeviceError* error) {
  PoolArguments arguments;
  arguments.table = problem.table.data();
  arguments.out = out.data();
  arguments.rows = rows;
  arguments.embedding_dim = problem.dim;
  arguments.table_stride = problem.stride;
  arguments.bags = problem.view();
  arguments.error = error;
  return arguments;
}

TEST(BagGpuSource, RecordsABadIdAndLeavesItOut) {
  Problem<float> problem(4);
  problem.ids[0] = rows;  // the only id of bag 1
  std::vector<float> out(static_cast<size_t>(problem.bags() * 4), 7.0f);
  core::DeviceError error = {};
  ASSERT_EQ(pool_cuda(pool_of(problem, out, &error), nullptr), nullptr);
  EXPECT_EQ(error.kind, core::ErrorKind::token_id);
  EXPECT_EQ(error.value, rows);
  EXPECT_EQ(error.index, 0);
  for (int i = 4; i < 8; ++i) EXPECT_EQ(out[static_cast<size_t>(i)], 0.0f);
}

TEST(BagGpuSource, RecordsTheFirstBadIdOfABag) {
  for (const int64_t dim : {4, 64, 520}) {
    Problem<float> problem(dim, 4);
    for (const size_t index : {20, 22, 60, 100}) problem.ids[index] = -static_cast<int32_t>(index);
    std::vector<float> out(static_cast<size_t>(problem.bags() * dim));
    core::DeviceError error = {};
    PoolArguments arguments = pool_of(problem, out, &error);
    ASSERT_EQ(pool_cuda(arguments, nullptr), nullptr);
    EXPECT_EQ(error.value, -20);
    EXPECT_EQ(error.index, 20);
    EXPECT_EQ(error.limit, rows);
    std::vector<float> same(out.size());
    for (const size_t index : {20, 22, 60, 100}) problem.ids[index] = padding;
    arguments.out = same.data();
    ASSERT_EQ(pool_cuda(arguments, nullptr), nullptr);
    EXPECT_TRUE(same_bits(out, same)) << dim;
  }
}

TEST(BagGpuSource, RecordsABadOffsetAndLeavesItsBagsEmpty) {
  for (const int64_t bad : {int64_t{-1}, int64_t{1} << 40}) {
    Problem<float> problem(4);
    problem.offsets[3] = bad;
    std::vector<float> out(static_cast<size_t>(problem.bags() * 4), 7.0f);
    core::DeviceError error = {};
    ASSERT_EQ(pool_cuda(pool_of(problem, out, &error), nullptr), nullptr);
    EXPECT_EQ(error.kind, core::ErrorKind::bag_offset);
    EXPECT_EQ(error.value, bad);
    EXPECT_EQ(error.index, 3);
    for (int i = 8; i < 16; ++i) EXPECT_EQ(out[static_cast<size_t>(i)], 0.0f);
  }
}

}  // namespace
}  // namespace posembed::bag
