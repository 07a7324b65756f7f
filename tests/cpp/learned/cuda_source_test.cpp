// Tests the source of the CUDA kernels, run on the CPU by tests/cpp/cuda_on_cpu: it gives the bits
// of the CPU kernels, in vectors of every width, and zeros for a position outside the table. Needs
// no GPU.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

// Renamed, because the library may contain the real launchers.
#define add_cuda add_cuda_on_cpu
#define sum_batch_cuda sum_batch_cuda_on_cpu
#include "learned/learned_cuda.cu"

namespace posembed::learned {
namespace {

constexpr core::Scalar scalars[] = {core::Scalar::float32, core::Scalar::float64, core::Scalar::bfloat16,
                                    core::Scalar::float16};
constexpr int64_t rows = 12, max_shift = 4;

/// Numbers of any type, as bytes.
std::vector<char> random_numbers(int64_t count, core::Scalar scalar, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<char> bytes(static_cast<size_t>(count * core::size_of(scalar)));
  core::visit_scalar(scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    auto* values = reinterpret_cast<T*>(bytes.data());
    for (int64_t i = 0; i < count; ++i) store(static_cast<Compute<T>>(normal(generator)), values + i);
  });
  return bytes;
}

/// A problem of [batch, seq, dim], with x stored as [seq, batch, dim + padding].
struct Problem {
  core::Scalar scalar;
  int64_t batch, seq, dim, padding, shift;
  std::vector<int32_t> positions;
  bool shared = false;
};

AddArguments arguments_of(const Problem& problem, const std::vector<char>& x, const std::vector<char>& weight) {
  const int64_t size = core::size_of(problem.scalar), stride = problem.dim + problem.padding;
  AddArguments arguments;
  arguments.x = x.data() + problem.shift * size;
  arguments.weight = weight.data() + problem.shift * size;
  arguments.scalar = problem.scalar;
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

void check(const Problem& problem) {
  const int64_t stride = problem.dim + problem.padding;
  const auto x = random_numbers(problem.batch * problem.seq * stride + max_shift, problem.scalar, 1);
  const auto weight = random_numbers(rows * stride + max_shift, problem.scalar, 2);
  AddArguments arguments = arguments_of(problem, x, weight);
  const int64_t count = problem.batch * problem.seq * problem.dim;
  std::vector<char> out(static_cast<size_t>(count * core::size_of(problem.scalar)) + 16, '\x5a');
  std::vector<char> expected = out;
  arguments.out = expected.data();
  add_cpu(arguments, 0, problem.batch * problem.seq);
  arguments.out = out.data();
  ASSERT_EQ(add_cuda(arguments, nullptr), nullptr);
  ASSERT_EQ(out, expected) << "dim " << problem.dim << ", padding " << problem.padding << ", shift " << problem.shift;
}

TEST(LearnedGpuSource, Adds) {
  for (const core::Scalar scalar : scalars) {
    for (const int64_t dim : {1, 8, 33, 64, 300, 302, 520, 2056}) {
      for (const int64_t padding : {0, 1, 2, 4, 8}) {
        for (const int64_t shift : {0, 1, 2, 4}) {
          ASSERT_NO_FATAL_FAILURE(check({scalar, 2, 3, dim, padding, shift, {}}));
        }
      }
      ASSERT_NO_FATAL_FAILURE(check({scalar, 2, 3, dim, 0, 0, {6, 0, -2, 9, 1, 5}}));
      ASSERT_NO_FATAL_FAILURE(check({scalar, 5, 3, dim, 0, 0, {6, 0, -2}, /*shared=*/true}));
    }
  }
}

TEST(LearnedGpuSource, AddsNothing) {
  check({core::Scalar::float32, 0, 3, 8, 0, 0, {}});
  check({core::Scalar::float32, 3, 0, 8, 0, 0, {}});
  check({core::Scalar::float32, 3, 3, 0, 0, 0, {}});
}

TEST(LearnedGpuSource, RecordsAPositionOutsideAndWritesZeros) {
  for (const int64_t dim : {33, 2056}) {
    const Problem problem{core::Scalar::float32, 1, 4, dim, 0, 0, {9, 10, -3, 0}};
    const auto x = random_numbers(4 * dim + 1, problem.scalar, 1);
    const auto weight = random_numbers(rows * dim + 1, problem.scalar, 2);
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

TEST(LearnedGpuSource, SumsOverTheBatch) {
  for (const core::Scalar scalar : scalars) {
    for (const int64_t batch : {0, 1, 7, 9, 64, 150}) {  // from 9 on, short ones in stages
      for (const int64_t dim : {0, 1, 11, 64, 300, 302, 1000, 4000}) {
        for (const int64_t shift : {0, 1, 2, 4}) {
          const auto gradient = random_numbers(batch * 3 * dim + max_shift, scalar, 3);
          std::vector<char> out(static_cast<size_t>(3 * dim * core::size_of(scalar)), '\x5a');
          std::vector<char> expected = out;
          SumArguments arguments;
          arguments.gradient = gradient.data() + shift * core::size_of(scalar);
          arguments.scalar = scalar;
          arguments.batch = batch;
          arguments.seq = 3;
          arguments.embedding_dim = dim;
          arguments.out = expected.data();
          sum_batch_cpu(arguments, 0, 3);
          arguments.out = out.data();
          ASSERT_EQ(sum_batch_cuda(arguments, nullptr), nullptr);
          ASSERT_EQ(out, expected) << "batch " << batch << ", dim " << dim << ", shift " << shift;
        }
      }
    }
  }
}

}  // namespace
}  // namespace posembed::learned
