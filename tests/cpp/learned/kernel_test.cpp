// Compares the learned-position kernels of every instruction set, and the source of the CUDA kernels, run on the CPU by
// tests/cpp/cuda_on_cpu, with plain loops. Needs no GPU.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

// Renamed, because the library may contain the real launchers.
#define add_cuda add_cuda_on_cpu
#define sum_batch_cuda sum_batch_cuda_on_cpu
#include "copies.h"
#include "learned/learned_cuda.cu"
#include "values.h"

namespace posembed::learned {
namespace {

constexpr int64_t rows = 12, max_shift = 4;

struct Copy {
  const char* name;
  decltype(&baseline::add) add;
  decltype(&baseline::sum_batch) sum_batch;
};

// Launches take no range of tokens.
void add_source(const AddArguments& arguments, int64_t, int64_t end) {
  if (end == arguments.batch * arguments.seq) ASSERT_EQ(add_cuda(arguments, nullptr), nullptr);
}

void sum_source(const SumArguments& arguments, int64_t, int64_t end) {
  if (end == arguments.seq) ASSERT_EQ(sum_batch_cuda(arguments, nullptr), nullptr);
}

std::vector<Copy> copies() {
  std::vector<Copy> all;
  POSEMBED_ADD_COPIES(all, isa::add, isa::sum_batch)
  all.push_back({"cuda source", add_source, sum_source});
  return all;
}

template <typename T>
bool same_bits(const std::vector<T>& left, const std::vector<T>& right) {
  return left.empty() ? right.empty() : std::memcmp(left.data(), right.data(), left.size() * sizeof(T)) == 0;
}

template <typename T>
class LearnedKernel : public testing::Test {};

using Scalars = testing::Types<float, double, core::BFloat16, core::Float16>;
TYPED_TEST_SUITE(LearnedKernel, Scalars);

/// A problem of [batch, seq, dim], with x stored as [seq, batch, dim + padding].
struct Problem {
  int64_t batch, seq, dim, padding, shift;
  std::vector<int32_t> positions;
  bool shared = false;
};

template <typename T>
AddArguments arguments_of(const Problem& problem, const std::vector<T>& x, const std::vector<T>& weight) {
  const int64_t stride = problem.dim + problem.padding;
  AddArguments arguments;
  arguments.x = x.data() + problem.shift;
  arguments.weight = weight.data() + problem.shift;
  arguments.scalar = scalar_of<T>();
  arguments.batch = problem.batch;
  arguments.seq = problem.seq;
  arguments.embedding_dim = problem.dim;
  arguments.x_stride[0] = stride;
  arguments.x_stride[1] = problem.batch * stride;
  arguments.rows = rows;
  arguments.weight_stride = stride;
  arguments.first_row = 2;
  if (problem.positions.empty()) {
    arguments.offset = 4;
  } else {
    arguments.positions = {problem.positions.data(), core::Index::int32};
    arguments.position_stride[0] = problem.shared ? 0 : problem.seq;
    arguments.position_stride[1] = 1;
  }
  return arguments;
}

template <typename T>
void check(const Problem& problem) {
  const int64_t stride = problem.dim + problem.padding, tokens = problem.batch * problem.seq;
  const auto x = random_values<T>(tokens * stride + max_shift, 1);
  const auto weight = random_values<T>(rows * stride + max_shift, 2);
  const auto before = random_values<T>(tokens * problem.dim + 8, 3);  // what lies behind is not written
  auto expected = before;
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t b = token / problem.seq, s = token % problem.seq;
    const int64_t row =
        problem.positions.empty() ? s + 6 : problem.positions[static_cast<size_t>(problem.shared ? s : token)] + 2;
    for (int64_t i = 0; i < problem.dim; ++i) {
      const double sum =
          at(x, problem.shift + (s * problem.batch + b) * stride + i) + at(weight, problem.shift + row * stride + i);
      core::store(static_cast<core::Compute<T>>(sum), &expected[static_cast<size_t>(token * problem.dim + i)]);
    }
  }
  AddArguments arguments = arguments_of(problem, x, weight);
  for (const Copy& copy : copies()) {
    auto out = before;
    arguments.out = out.data();
    copy.add(arguments, 0, tokens / 2);
    copy.add(arguments, tokens / 2, tokens);
    ASSERT_TRUE(same_bits(out, expected))
        << copy.name << ", dim " << problem.dim << ", padding " << problem.padding << ", shift " << problem.shift;
  }
}

TYPED_TEST(LearnedKernel, Adds) {
  for (const int64_t dim : {1, 8, 33, 64, 300, 302, 520, 2056}) {
    for (const int64_t padding : {0, 1, 2, 4, 8}) {
      for (const int64_t shift : {0, 1, 2, 4}) {
        ASSERT_NO_FATAL_FAILURE(check<TypeParam>({2, 3, dim, padding, shift, {}}));
      }
    }
    // -2 with first_row 2: the table's first row.
    ASSERT_NO_FATAL_FAILURE(check<TypeParam>({2, 3, dim, 0, 0, {6, 0, -2, 9, 1, 5}}));
    ASSERT_NO_FATAL_FAILURE(check<TypeParam>({5, 3, dim, 0, 0, {6, 0, -2}, /*shared=*/true}));
  }
  check<TypeParam>({0, 3, 8, 0, 0, {}});
  check<TypeParam>({3, 0, 8, 0, 0, {}});
  check<TypeParam>({3, 3, 0, 0, 0, {}});
}

TYPED_TEST(LearnedKernel, SumsOverTheBatch) {
  using T = TypeParam;
  SumArguments arguments;
  arguments.scalar = scalar_of<T>();
  arguments.seq = 3;
  for (const int64_t batch : {0, 1, 7, 9, 64, 150, 300}) {  // on GPUs from 9 on, short ones in stages
    for (const int64_t dim : {0, 1, 11, 64, 300, 302, 1000, 4000}) {
      for (const int64_t shift : {0, 1, 2, 4}) {
        auto gradient = random_values<T>(batch * 3 * dim + max_shift, 3);
        if (batch == 300) {
          if (dim > 64 || shift != 0) continue;
          for (T& value : gradient) core::store(core::Compute<T>(1), &value);
        }
        arguments.gradient = gradient.data() + shift;
        arguments.batch = batch;
        arguments.embedding_dim = dim;
        std::vector<T> first(static_cast<size_t>(3 * dim)), out = first;
        arguments.out = first.data();
        baseline::sum_batch(arguments, 0, 3);
        // 300 is exact in every type, but a sum of ones in bfloat16 would stop at 256.
        for (int64_t i = 0; batch == 300 && i < 3 * dim; ++i) ASSERT_EQ(at(first, i), 300.0);
        arguments.out = out.data();
        for (const Copy& copy : copies()) {
          for (T& value : out) core::store(core::Compute<T>(7), &value);
          copy.sum_batch(arguments, 0, 1);
          copy.sum_batch(arguments, 1, 3);
          ASSERT_TRUE(same_bits(out, first)) << copy.name << ", batch " << batch << ", dim " << dim;
        }
      }
    }
  }
}

TEST(LearnedGpuSource, RecordsAPositionOutsideAndWritesZeros) {
  for (const int64_t dim : {33, 2056}) {
    const Problem problem{1, 4, dim, 0, 0, {9, 10, -3, 0}};
    const auto x = random_values<float>(4 * dim, 1), weight = random_values<float>(rows * dim, 2);
    AddArguments arguments = arguments_of(problem, x, weight);
    std::vector<float> out(static_cast<size_t>(4 * dim), 1.0f);
    core::DeviceError error = {};
    arguments.out = out.data();
    arguments.error = &error;
    ASSERT_EQ(add_cuda(arguments, nullptr), nullptr);
    EXPECT_EQ(error.state, 2u);
    EXPECT_EQ(error.kind, core::ErrorKind::position);
    EXPECT_TRUE(error.index == 1 || error.index == 2);  // blocks run in any order
    EXPECT_EQ(error.value, problem.positions.at(static_cast<size_t>(error.index)));
    EXPECT_EQ(error.limit, 10);
    for (int64_t i = 0; i < 4 * dim; ++i) {
      const bool outside = i / dim == 1 || i / dim == 2;
      ASSERT_EQ(out[static_cast<size_t>(i)] == 0, outside) << i;
    }
  }
}

}  // namespace
}  // namespace posembed::learned
