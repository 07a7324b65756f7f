// Compares the input kernels with plain loops in double, on every instruction set of the processor.
#include <cstring>
#include <memory>

#include "copies.h"
#include "input/problems.h"
#include "sinusoidal/problems.h"

namespace posembed::input {
namespace {

struct Copy {
  const char* name;
  decltype(&baseline::forward) forward;
  decltype(&baseline::backward) backward;
  decltype(&baseline::add_parts) add_parts;
  decltype(&baseline::drop) drop;
};

std::vector<Copy> copies() {
  std::vector<Copy> all;
  POSEMBED_ADD_COPIES(all, isa::forward, isa::backward, isa::add_parts, isa::drop)
  return all;
}

/// Compares token rows and sinusoids at consecutive and given positions with the sinusoidal kernel.
template <typename T>
void expect_sinusoids(const Case<T>& problem, const sinusoidal::Sinusoid& sinusoid) {
  const std::vector<int32_t> positions = {5, -3, 0, 1000000, 7, 7, 7, -1, 1, 0};
  const auto size = static_cast<size_t>(problem.tokens * problem.dim);
  for (const bool placed : {false, true}) {
    for (const Copy& copy : copies()) {
      std::vector<T> plain(size), expected(size), out(size);
      ForwardArguments arguments;
      arguments.input = problem.arguments();
      arguments.input.type = arguments.input.position = Table{};
      arguments.out = plain.data();
      arguments.input.scale = 1.0;
      copy.forward(arguments, 0, problem.tokens);
      sinusoidal::Arguments add;
      add.sinusoid = sinusoid;
      add.in = plain.data();
      add.out = expected.data();
      add.scalar = scalar_of<T>();
      add.batch = problem.batch;
      add.seq = problem.seq;
      add.in_stride[0] = add.out_stride[0] = problem.seq * problem.dim;
      add.in_stride[1] = add.out_stride[1] = problem.dim;
      add.offset = 3;
      arguments.input.sinusoid = sinusoid;
      arguments.input.position.offset = 3;
      if (placed) {
        add.offset = 0;
        add.positions.data = positions.data();
        add.positions.index = core::Index::int32;
        add.position_stride[0] = problem.seq;
        add.position_stride[1] = 1;
        arguments.input.position.index = {positions.data(), core::Index::int32};
        arguments.input.position.index_stride[0] = problem.seq;
        arguments.input.position.index_stride[1] = 1;
      }
      sinusoidal::baseline::encode(add, 0, sinusoidal::encodings(add));
      arguments.out = out.data();
      copy.forward(arguments, 0, problem.tokens);
      ASSERT_EQ(std::memcmp(out.data(), expected.data(), size * sizeof(T)), 0)
          << copy.name << " dim " << problem.dim << " placed " << placed;
    }
  }
}

template <typename T>
class InputKernel : public testing::Test {};

TYPED_TEST_SUITE(InputKernel, Scalars);

TYPED_TEST(InputKernel, ForwardMatchesPlainLoops) {
  using T = TypeParam;
  using C = core::Compute<T>;
  for (const Case<T>& problem : cases<T>()) {
    std::vector<T> first;
    for (const Copy& copy : copies()) {
      const int64_t dim = problem.dim;
      std::vector<T> out(static_cast<size_t>(problem.tokens * dim));
      std::vector<C> mean(10), rstd(10);
      ForwardArguments arguments;
      arguments.input = problem.arguments();
      arguments.out = out.data();
      arguments.mean = mean.data();
      arguments.rstd = rstd.data();
      copy.forward(arguments, 0, 3);
      copy.forward(arguments, 3, problem.tokens);
      for (int64_t row = 0; row < problem.tokens; ++row) {
        const auto [x, scale] = problem.normalised(row);
        if (problem.norm != Norm::none) {
          EXPECT_NEAR(static_cast<double>(rstd[static_cast<size_t>(row)]), scale, 1e-4 * scale);
        }
        for (int64_t i = 0; i < dim; ++i) {
          const double bias = problem.norm == Norm::layer ? at(problem.bias, i) : 0;
          const double product = x[static_cast<size_t>(i)] * problem.weight_at(i);
          const double expected = (product + bias) * problem.factor(row, i);
          ASSERT_NEAR(at(out, row * dim + i), expected, 2 * tolerance<T>() * (std::abs(product) + std::abs(bias) + 1))
              << copy.name << " dim " << dim << " norm " << static_cast<int>(problem.norm) << " row " << row
              << " column " << i;
        }
      }
      if (first.empty()) first = out;
      EXPECT_EQ(std::memcmp(first.data(), out.data(), out.size() * sizeof(T)), 0)
          << copy.name << " differs from baseline, dim " << dim;
    }
  }
}

TYPED_TEST(InputKernel, BackwardMatchesPlainLoops) {
  using T = TypeParam;
  using C = core::Compute<T>;
  for (const Case<T>& problem : cases<T>()) {
    const int64_t dim = problem.dim;
    std::vector<double> weight(static_cast<size_t>(dim)), bias(weight), sum(static_cast<size_t>(problem.tokens * dim));
    std::vector<C> means(10), rstds(10);
    for (int64_t row = 0; row < problem.tokens; ++row) {
      const auto [x, rstd] = problem.normalised(row);
      double mean = 0, projection = 0;
      std::vector<double> dy(static_cast<size_t>(dim));
      for (int64_t i = 0; i < dim; ++i) {
        const auto at_i = static_cast<size_t>(i);
        const double g = at(problem.gradient, row * dim + i) * problem.factor(row, i);
        weight[at_i] += g * x[at_i];
        bias[at_i] += g;
        dy[at_i] = g * problem.weight_at(i);
        mean += dy[at_i] / static_cast<double>(dim);
        projection += dy[at_i] * x[at_i] / static_cast<double>(dim);
      }
      if (problem.norm != Norm::layer) mean = 0;
      if (problem.norm == Norm::none) projection = 0;
      for (int64_t i = 0; i < dim; ++i) {
        const auto at_i = static_cast<size_t>(i);
        sum[static_cast<size_t>(row * dim) + at_i] = rstd * (dy[at_i] - mean - x[at_i] * projection);
      }
    }
    for (const Copy& copy : copies()) {
      std::vector<T> out(static_cast<size_t>(problem.tokens * dim)), weight_gradient(weight.size()),
          bias_gradient(weight.size());
      ForwardArguments forward;
      forward.input = problem.arguments();
      forward.out = out.data();
      forward.mean = means.data();
      forward.rstd = rstds.data();
      copy.forward(forward, 0, problem.tokens);
      std::vector<C> partial(static_cast<size_t>(3 * 4 * partial_columns(dim)));
      std::vector<T> type_gradient(static_cast<size_t>(2 * dim)),
          position_gradient(static_cast<size_t>(problem.seq * dim));
      BackwardArguments arguments;
      arguments.input = problem.arguments();
      arguments.gradient = problem.gradient.data();
      arguments.mean = means.data();
      arguments.rstd = rstds.data();
      arguments.sum_gradient = out.data();
      arguments.parts = 3;
      arguments.partial = partial.data();
      if (problem.norm != Norm::none) {
        arguments.weight_gradient = weight_gradient.data();
        arguments.bias_gradient = bias_gradient.data();
      }
      arguments.type_gradient = type_gradient.data();
      arguments.position_gradient = position_gradient.data();
      copy.backward(arguments, 0, 2);
      copy.backward(arguments, 2, 3);
      const double unit = 30 * tolerance<T>();
      for (int64_t i = 0; i < problem.tokens * dim; ++i) {
        const double scale = dim == 1 ? 1e3 : 1;  // a single value's derivative is all cancellation
        ASSERT_NEAR(at(out, i), sum[static_cast<size_t>(i)], scale * unit * (std::abs(sum[static_cast<size_t>(i)]) + 1))
            << copy.name << " dim " << dim << " norm " << static_cast<int>(problem.norm) << " at " << i;
      }
      copy.add_parts(arguments, 0, 1);
      copy.add_parts(arguments, 1, 4);
      const auto scale = dim == 1 ? 1e3 * unit : 10 * unit;
      for (int64_t i = 0; i < dim; ++i) {
        std::vector<double> types(2), positions(static_cast<size_t>(problem.seq));
        for (int64_t row = 0; row < problem.tokens; ++row) {
          const double value = sum[static_cast<size_t>(row * dim + i)];
          types[static_cast<size_t>(row % 2)] += value;
          positions[static_cast<size_t>(row % problem.seq)] += value;
        }
        for (int64_t t = 0; t < 2; ++t) {
          const double expected = types[static_cast<size_t>(t)];
          ASSERT_NEAR(at(type_gradient, t * dim + i), expected, scale * (std::abs(expected) + 1))
              << copy.name << " type " << t << " column " << i;
        }
        for (int64_t p = 0; p < problem.seq; ++p) {
          const double expected = positions[static_cast<size_t>(p)];
          ASSERT_NEAR(at(position_gradient, p * dim + i), expected, scale * (std::abs(expected) + 1))
              << copy.name << " position " << p << " column " << i;
        }
      }
      if (problem.norm == Norm::none) continue;
      for (int64_t i = 0; i < dim; ++i) {
        ASSERT_NEAR(at(weight_gradient, i), weight[static_cast<size_t>(i)], unit * 10) << copy.name << " at " << i;
        ASSERT_NEAR(at(bias_gradient, i), bias[static_cast<size_t>(i)], unit * 10) << copy.name << " at " << i;
      }
    }
  }
}

/// A backward pass without destinations for its gradients.
template <typename T>
BackwardArguments in_three_parts(const Case<T>& problem, const std::vector<core::Compute<T>>& mean,
                                 const std::vector<core::Compute<T>>& rstd) {
  BackwardArguments arguments;
  arguments.input = problem.arguments();
  arguments.gradient = problem.gradient.data();
  arguments.mean = mean.data();
  arguments.rstd = rstd.data();
  arguments.parts = 3;
  return arguments;
}

/// Writes each token's row to its own address, or nowhere, as a sum of one term, which is never -0.
template <typename T>
void expect_rows_at_addresses(const Case<T>& problem, const Copy& copy) {
  const auto size = static_cast<size_t>(problem.tokens * problem.dim);
  std::vector<T> whole(size), memory(size + 64);
  void* aligned = memory.data();
  size_t space = memory.size() * sizeof(T);
  T* rows = static_cast<T*>(std::align(64, size * sizeof(T), aligned, space));
  std::vector<core::Compute<T>> mean(10, 0), rstd(10, 1);
  std::vector<void*> addresses;
  for (int64_t row = 0; row < problem.tokens; ++row) {
    addresses.push_back(row % 4 == 3 ? nullptr : rows + (problem.tokens - 1 - row) * problem.dim);
  }
  BackwardArguments arguments = in_three_parts(problem, mean, rstd);
  arguments.sum_gradient = whole.data();
  copy.backward(arguments, 0, 3);
  arguments.sum_gradient = nullptr;
  arguments.sum_rows = addresses.data();
  copy.backward(arguments, 0, 3);
  for (int64_t row = 0; row < problem.tokens; ++row) {
    for (int64_t i = 0; i < problem.dim; ++i) {
      const double expected = row % 4 == 3 ? 0 : at(whole, row * problem.dim + i);
      const auto found = static_cast<double>(core::load(rows[(problem.tokens - 1 - row) * problem.dim + i]));
      ASSERT_EQ(found, expected) << copy.name << " row " << row << " column " << i;
      ASSERT_FALSE(found == 0 && std::signbit(found)) << copy.name << " row " << row;
    }
  }
}

TYPED_TEST(InputKernel, WritesRowsWhereTheyBelong) {
  for (Case<TypeParam>& problem : cases<TypeParam>()) {
    for (size_t i = 0; i < problem.gradient.size(); i += 3) core::store(-0.0f, &problem.gradient[i]);
    for (const Copy& copy : copies()) {
      expect_rows_at_addresses(problem, copy);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TYPED_TEST(InputKernel, StreamsRowsWhereTheyBelong) {
  const Case<TypeParam> problem(int64_t{1} << 18, Norm::none, 0);
  for (const Copy& copy : copies()) expect_rows_at_addresses(problem, copy);
}

/// In unaligned memory, where non-temporal stores would fault, the bits are the same.
TYPED_TEST(InputKernel, StreamsPositionGradientsOnlyWhereTheyAreAligned) {
  using T = TypeParam;
  const Case<T> problem(int64_t{1} << 18, Norm::layer, 0);
  const auto size = static_cast<size_t>(problem.seq * problem.dim);
  std::vector<core::Compute<T>> mean(10, 0), rstd(10, 1);
  BackwardArguments arguments = in_three_parts(problem, mean, rstd);
  for (const Copy& copy : copies()) {
    std::vector<T> memory(size + 65);
    void* start = memory.data();
    size_t space = memory.size() * sizeof(T);
    T* aligned = static_cast<T*>(std::align(64, size * sizeof(T), start, space));
    arguments.position_gradient = aligned;
    copy.backward(arguments, 0, 3);
    const std::vector<T> streamed(aligned, aligned + size);
    arguments.position_gradient = aligned + 1;
    copy.backward(arguments, 0, 3);
    EXPECT_EQ(std::memcmp(aligned + 1, streamed.data(), size * sizeof(T)), 0) << copy.name;
  }
}

TYPED_TEST(InputKernel, WithoutNormAndDropoutTheGradientIsNotCopied) {
  using T = TypeParam;
  Case<T> problem(40, Norm::none, 0);
  for (const Copy& copy : copies()) {
    std::vector<T> positions(static_cast<size_t>(problem.seq * problem.dim));
    BackwardArguments arguments;
    arguments.input = problem.arguments();
    arguments.gradient = problem.gradient.data();
    arguments.position_gradient = positions.data();
    copy.backward(arguments, 0, 1);
    for (int64_t i = 0; i < problem.seq * problem.dim; ++i) {
      const double expected = at(problem.gradient, i) + at(problem.gradient, problem.seq * problem.dim + i);
      ASSERT_NEAR(at(positions, i), expected, tolerance<T>() * (std::abs(expected) + 1)) << copy.name;
    }
  }
}

/// The bits equal those of the sinusoidal kernel in every layout, with and without partial vectors.
TYPED_TEST(InputKernel, AddsSinusoidsAsTheSinusoidalKernelDoes) {
  using T = TypeParam;
  using sinusoidal::Preset;
  for (const int64_t dim : {1, 2, 30, 31, 64, 83, 130}) {
    for (const Preset preset : {Preset::vaswani, Preset::marian, Preset::tensor2tensor}) {
      for (const bool cos_first : {false, true}) {
        Case<T> problem(dim, Norm::none, 0);
        sinusoidal::Encoding encoding(preset, dim, 10000, 0, cos_first);
        encoding.sinusoid.scale = 0.5;
        encoding.sinusoid.first = cos_first ? 4 : 0;
        expect_sinusoids(problem, encoding.sinusoid);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(InputDropout, DependsOnTheElementAlone) {
  const int64_t seed = 42, count = 5000;
  std::vector<float> ones(count, 1.0f), whole(count), pieces(count);
  for (const Copy& copy : copies()) {
    DropoutArguments arguments;
    arguments.x = ones.data();
    arguments.out = whole.data();
    arguments.count = count;
    arguments.probability = 0.25;
    arguments.seed = &seed;
    copy.drop(arguments, 0, count);
    arguments.out = pieces.data();
    for (const auto& [begin, end] : {std::pair(0, 1), {1, 1030}, {1030, 4999}, {4999, 5000}})
      copy.drop(arguments, begin, end);
    EXPECT_EQ(whole, pieces) << copy.name;
    double kept = 0;
    const core::Dropout dropout = core::make_dropout(0.25, 42);
    for (int64_t i = 0; i < count; ++i) {
      ASSERT_EQ(whole[static_cast<size_t>(i)], core::dropout_factor<float>(dropout, static_cast<uint64_t>(i)));
      kept += whole[static_cast<size_t>(i)] != 0;
    }
    EXPECT_NEAR(kept / count, 0.75, 0.03);  // five standard deviations
  }
}

TEST(InputDropout, KeepsAllOrNothingAtTheEnds) {
  const int64_t seed = 7;
  std::vector<double> x(1000, 3.0), out(1000);
  for (const Copy& copy : copies()) {
    DropoutArguments arguments{x.data(), out.data(), Scalar::float64, 1000, 0.0, &seed};
    copy.drop(arguments, 0, 1000);
    EXPECT_EQ(out, x) << copy.name;
    arguments.probability = 1.0;
    copy.drop(arguments, 0, 1000);
    EXPECT_EQ(out, std::vector<double>(1000, 0.0)) << copy.name;
  }
}

// Known answers of Philox4x32-10 from its authors' Random123 test vectors (kat_vectors).
TEST(Philox, GivesTheAuthorsKnownAnswers) {
  const core::Random4 zeros = core::philox(0, 0);
  EXPECT_EQ(zeros.words[0], 0x6627e8d5u);
  EXPECT_EQ(zeros.words[1], 0xe169c58du);
  EXPECT_EQ(zeros.words[2], 0xbc57ac4cu);
  EXPECT_EQ(zeros.words[3], 0x9b00dbd8u);
}

}  // namespace
}  // namespace posembed::input
