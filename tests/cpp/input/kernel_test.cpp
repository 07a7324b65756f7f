// The input kernels against plain loops in double, on every instruction set that the processor has.
#include "input/kernel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "core/philox.h"
#include "sinusoidal/frequencies.h"
#include "sinusoidal/kernel.h"

namespace posembed::input {
namespace {

using core::Scalar;

struct Copy {
  const char* name;
  decltype(&baseline::forward) forward;
  decltype(&baseline::backward) backward;
  decltype(&baseline::add_parts) add_parts;
  decltype(&baseline::drop) drop;
};

std::vector<Copy> copies() {
  std::vector<Copy> all{
      {"baseline", baseline::forward, baseline::backward, baseline::add_parts, baseline::drop}};
#if defined(POSEMBED_X86_VARIANTS)
  const core::InstructionSet set = core::instruction_set();
  if (set >= core::InstructionSet::avx2) {
    all.push_back({"avx2", avx2::forward, avx2::backward, avx2::add_parts, avx2::drop});
  }
  if (set >= core::InstructionSet::avx512) {
    all.push_back({"avx512", avx512::forward, avx512::backward, avx512::add_parts, avx512::drop});
  }
#endif
  return all;
}

template <typename T>
constexpr Scalar scalar_of() {
  if constexpr (std::is_same_v<T, double>) return Scalar::float64;
  if constexpr (std::is_same_v<T, core::BFloat16>) return Scalar::bfloat16;
  if constexpr (std::is_same_v<T, core::Float16>) return Scalar::float16;
  return Scalar::float32;
}

/// Relative tolerance of one rounding to T, and of a few dozen in its compute type.
template <typename T>
constexpr double tolerance() {
  if constexpr (std::is_same_v<T, double>) return 1e-13;
  if constexpr (std::is_same_v<T, core::BFloat16>) return 5e-3;
  if constexpr (std::is_same_v<T, core::Float16>) return 7e-4;
  return 3e-6;
}

template <typename T>
std::vector<T> random_values(int64_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<T> values(static_cast<size_t>(count));
  for (T& value : values) core::store(static_cast<core::Compute<T>>(normal(generator)), &value);
  return values;
}

template <typename T>
double at(const std::vector<T>& values, int64_t index) {
  return static_cast<double>(core::load(values[static_cast<size_t>(index)]));
}

/// A batch with every table, and what the kernels should make of it, in double.
template <typename T>
struct Case {
  using C = core::Compute<T>;

  Case(int64_t dim, Norm norm, double probability)
      : dim(dim), norm(norm), probability(probability) {
    token = random_values<T>(11 * dim, 1);
    type = random_values<T>(2 * dim, 2);
    position = random_values<T>(9 * dim, 3);
    weight = random_values<T>(dim, 4);
    bias = random_values<T>(dim, 5);
    gradient = random_values<T>(tokens * dim, 6);
    for (int64_t i = 0; i < tokens; ++i) {
      ids.push_back(static_cast<int32_t>(i * 7 % 11));
      types.push_back(i % 2);
    }
  }

  Arguments arguments() const {
    Arguments a;
    a.scalar = scalar_of<T>();
    a.batch = batch;
    a.seq = seq;
    a.embedding_dim = dim;
    a.token.data = token.data();
    a.token.rows = 11;
    a.token.stride = dim;
    a.token.index = {ids.data(), core::Index::int32};
    a.token.index_stride[0] = seq;
    a.token.index_stride[1] = 1;
    a.type = a.token;
    a.type.data = type.data();
    a.type.rows = 2;
    a.type.index = {types.data(), core::Index::int64};
    a.position.data = position.data();
    a.position.rows = 9;
    a.position.stride = dim;
    a.position.offset = 1;
    a.position.first_row = 2;
    a.scale = scale;
    a.norm = norm;
    a.eps = 1e-5;
    if (norm != Norm::none) a.norm_weight = weight.data();
    if (norm == Norm::layer) a.norm_bias = bias.data();
    a.dropout = probability;
    a.seed = probability > 0 ? &seed : nullptr;
    return a;
  }

  double factor(int64_t row, int64_t i) const {
    if (probability == 0) return 1;
    return core::dropout_factor<double>(
        core::make_dropout(probability, static_cast<uint64_t>(seed)),
        static_cast<uint64_t>(row * dim + i));
  }

  /// The normalised row and its rstd; without a norm, the sum and 1.
  std::pair<std::vector<double>, double> normalised(int64_t row) const {
    std::vector<double> x(static_cast<size_t>(dim));
    double mean = 0, squares = 0;
    for (int64_t i = 0; i < dim; ++i) {
      double& value = x[static_cast<size_t>(i)];
      value = at(token, ids[static_cast<size_t>(row)] * dim + i) * scale +
              at(type, types[static_cast<size_t>(row)] * dim + i) +
              at(position, (row % seq + 3) * dim + i);
      mean += value / static_cast<double>(dim);
    }
    if (norm == Norm::none) return {x, 1};
    if (norm == Norm::rms) mean = 0;
    for (double& value : x) {
      value -= mean;
      squares += value * value / static_cast<double>(dim);
    }
    const double rstd = 1 / std::sqrt(squares + 1e-5);
    for (double& value : x) value *= rstd;
    return {x, rstd};
  }

  double weight_at(int64_t i) const { return norm == Norm::none ? 1 : at(weight, i); }

  int64_t batch = 2, seq = 5, tokens = 10, dim;
  Norm norm;
  double probability, scale = 1.5;
  int64_t seed = -1234567890123;
  std::vector<T> token, type, position, weight, bias, gradient;
  std::vector<int32_t> ids;
  std::vector<int64_t> types;
};

/// Token rows and sinusoids of consecutive and of given positions, beside the sinusoidal kernel.
template <typename T>
void expect_sinusoids(const Case<T>& given, const sinusoidal::Sinusoid& sinusoid) {
  const std::vector<int32_t> positions = {5, -3, 0, 1000000, 7, 7, 7, 2, 1, 0};
  const auto size = static_cast<size_t>(given.tokens * given.dim);
  for (const bool placed : {false, true}) {
    for (const Copy& copy : copies()) {
      std::vector<T> plain(size), expected(size), out(size);
      ForwardArguments arguments;
      arguments.input = given.arguments();
      arguments.input.type = arguments.input.position = Table{};
      arguments.out = plain.data();
      arguments.input.scale = 1.0;
      copy.forward(arguments, 0, given.tokens);
      sinusoidal::Arguments add;
      add.sinusoid = sinusoid;
      add.in = plain.data();
      add.out = expected.data();
      add.scalar = scalar_of<T>();
      add.batch = given.batch;
      add.seq = given.seq;
      add.in_stride[0] = add.out_stride[0] = given.seq * given.dim;
      add.in_stride[1] = add.out_stride[1] = given.dim;
      add.offset = 3;
      arguments.input.sinusoid = sinusoid;
      arguments.input.position.offset = 3;
      if (placed) {
        add.offset = 0;
        add.positions.data = positions.data();
        add.positions.index = core::Index::int32;
        add.position_stride[0] = given.seq;
        add.position_stride[1] = 1;
        arguments.input.position.index = {positions.data(), core::Index::int32};
        arguments.input.position.index_stride[0] = given.seq;
        arguments.input.position.index_stride[1] = 1;
      }
      sinusoidal::baseline::encode(add, 0, sinusoidal::encodings(add));
      arguments.out = out.data();
      copy.forward(arguments, 0, given.tokens);
      ASSERT_EQ(std::memcmp(out.data(), expected.data(), size * sizeof(T)), 0)
          << copy.name << " dim " << given.dim << " placed " << placed;
    }
  }
}

template <typename T>
class InputKernel : public testing::Test {};

using Scalars = testing::Types<float, double, core::BFloat16, core::Float16>;
TYPED_TEST_SUITE(InputKernel, Scalars);

template <typename T>
std::vector<Case<T>> cases() {
  std::vector<Case<T>> all;
  for (const int64_t dim : {1, 15, 64, 83}) {
    for (const Norm norm : {Norm::none, Norm::layer, Norm::rms}) {
      if (dim == 1 && norm == Norm::layer) continue;  // one value has no variance
      for (const double probability : {0.0, 0.4}) all.emplace_back(dim, norm, probability);
    }
  }
  return all;
}

TYPED_TEST(InputKernel, ForwardMatchesPlainLoops) {
  using T = TypeParam;
  using C = core::Compute<T>;
  for (const Case<T>& given : cases<T>()) {
    std::vector<T> first;
    for (const Copy& copy : copies()) {
      const int64_t dim = given.dim;
      std::vector<T> out(static_cast<size_t>(given.tokens * dim));
      std::vector<C> mean(10), rstd(10);
      ForwardArguments arguments;
      arguments.input = given.arguments();
      arguments.out = out.data();
      arguments.mean = mean.data();
      arguments.rstd = rstd.data();
      copy.forward(arguments, 0, 3);
      copy.forward(arguments, 3, given.tokens);
      for (int64_t row = 0; row < given.tokens; ++row) {
        const auto [x, scale] = given.normalised(row);
        if (given.norm != Norm::none) {
          EXPECT_NEAR(static_cast<double>(rstd[static_cast<size_t>(row)]), scale, 1e-4 * scale);
        }
        for (int64_t i = 0; i < dim; ++i) {
          const double bias = given.norm == Norm::layer ? at(given.bias, i) : 0;
          const double product = x[static_cast<size_t>(i)] * given.weight_at(i);
          const double expected = (product + bias) * given.factor(row, i);
          ASSERT_NEAR(at(out, row * dim + i), expected,
                      2 * tolerance<T>() * (std::abs(product) + std::abs(bias) + 1))
              << copy.name << " dim " << dim << " norm " << static_cast<int>(given.norm) << " row "
              << row << " column " << i;
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
  for (const Case<T>& given : cases<T>()) {
    const int64_t dim = given.dim;
    std::vector<double> weight(static_cast<size_t>(dim)), bias(weight),
        sum(static_cast<size_t>(given.tokens * dim));
    std::vector<C> means(10), rstds(10);
    for (int64_t row = 0; row < given.tokens; ++row) {
      const auto [x, rstd] = given.normalised(row);
      double mean = 0, along = 0;
      std::vector<double> dy(static_cast<size_t>(dim));
      for (int64_t i = 0; i < dim; ++i) {
        const auto at_i = static_cast<size_t>(i);
        const double g = at(given.gradient, row * dim + i) * given.factor(row, i);
        weight[at_i] += g * x[at_i];
        bias[at_i] += g;
        dy[at_i] = g * given.weight_at(i);
        mean += dy[at_i] / static_cast<double>(dim);
        along += dy[at_i] * x[at_i] / static_cast<double>(dim);
      }
      if (given.norm != Norm::layer) mean = 0;
      if (given.norm == Norm::none) along = 0;
      for (int64_t i = 0; i < dim; ++i) {
        const auto at_i = static_cast<size_t>(i);
        sum[static_cast<size_t>(row * dim) + at_i] = rstd * (dy[at_i] - mean - x[at_i] * along);
      }
    }
    for (const Copy& copy : copies()) {
      std::vector<T> out(static_cast<size_t>(given.tokens * dim)), weight_gradient(weight.size()),
          bias_gradient(weight.size());
      ForwardArguments forward;
      forward.input = given.arguments();
      forward.out = out.data();
      forward.mean = means.data();
      forward.rstd = rstds.data();
      copy.forward(forward, 0, given.tokens);
      std::vector<C> partial(static_cast<size_t>(3 * 4 * partial_columns(dim)));
      std::vector<T> type_gradient(static_cast<size_t>(2 * dim)),
          position_gradient(static_cast<size_t>(given.seq * dim));
      BackwardArguments arguments;
      arguments.input = given.arguments();
      arguments.gradient = given.gradient.data();
      arguments.mean = means.data();
      arguments.rstd = rstds.data();
      arguments.sum_gradient = out.data();
      arguments.parts = 3;
      arguments.partial = partial.data();
      if (given.norm != Norm::none) {
        arguments.weight_gradient = weight_gradient.data();
        arguments.bias_gradient = bias_gradient.data();
      }
      arguments.type_gradient = type_gradient.data();
      arguments.position_gradient = position_gradient.data();
      copy.backward(arguments, 0, 2);
      copy.backward(arguments, 2, 3);
      const double unit = 30 * tolerance<T>();
      for (int64_t i = 0; i < given.tokens * dim; ++i) {
        const double scale = dim == 1 ? 1e3 : 1;  // a lone value's derivative is all cancellation
        ASSERT_NEAR(at(out, i), sum[static_cast<size_t>(i)],
                    scale * unit * (std::abs(sum[static_cast<size_t>(i)]) + 1))
            << copy.name << " dim " << dim << " norm " << static_cast<int>(given.norm) << " at "
            << i;
      }
      copy.add_parts(arguments, 0, 1);
      copy.add_parts(arguments, 1, 4);
      const auto scale = dim == 1 ? 1e3 * unit : 10 * unit;
      for (int64_t i = 0; i < dim; ++i) {
        std::vector<double> types(2), positions(static_cast<size_t>(given.seq));
        for (int64_t row = 0; row < given.tokens; ++row) {
          const double value = sum[static_cast<size_t>(row * dim + i)];
          types[static_cast<size_t>(row % 2)] += value;
          positions[static_cast<size_t>(row % given.seq)] += value;
        }
        for (int64_t t = 0; t < 2; ++t) {
          const double expected = types[static_cast<size_t>(t)];
          ASSERT_NEAR(at(type_gradient, t * dim + i), expected, scale * (std::abs(expected) + 1))
              << copy.name << " type " << t << " column " << i;
        }
        for (int64_t p = 0; p < given.seq; ++p) {
          const double expected = positions[static_cast<size_t>(p)];
          ASSERT_NEAR(at(position_gradient, p * dim + i), expected,
                      scale * (std::abs(expected) + 1))
              << copy.name << " position " << p << " column " << i;
        }
      }
      if (given.norm == Norm::none) continue;
      for (int64_t i = 0; i < dim; ++i) {
        ASSERT_NEAR(at(weight_gradient, i), weight[static_cast<size_t>(i)], unit * 10)
            << copy.name << " at " << i;
        ASSERT_NEAR(at(bias_gradient, i), bias[static_cast<size_t>(i)], unit * 10)
            << copy.name << " at " << i;
      }
    }
  }
}

TYPED_TEST(InputKernel, WithoutNormAndDropoutTheGradientIsNotCopied) {
  using T = TypeParam;
  Case<T> given(40, Norm::none, 0);
  for (const Copy& copy : copies()) {
    std::vector<T> positions(static_cast<size_t>(given.seq * given.dim));
    BackwardArguments arguments;
    arguments.input = given.arguments();
    arguments.gradient = given.gradient.data();
    arguments.position_gradient = positions.data();
    copy.backward(arguments, 0, 1);
    for (int64_t i = 0; i < given.seq * given.dim; ++i) {
      const double expected = at(given.gradient, i) + at(given.gradient, given.seq * given.dim + i);
      ASSERT_NEAR(at(positions, i), expected, tolerance<T>() * (std::abs(expected) + 1))
          << copy.name;
    }
  }
}

/// The same bits as the sinusoidal kernel, in every layout, with and without a part of a vector.
TYPED_TEST(InputKernel, AddsSinusoidsAsTheSinusoidalKernelDoes) {
  using T = TypeParam;
  using sinusoidal::Preset;
  for (const int64_t dim : {1, 2, 30, 31, 64, 83, 130}) {
    for (const Preset preset : {Preset::vaswani, Preset::marian, Preset::tensor2tensor}) {
      for (const bool cos_first : {false, true}) {
        Case<T> given(dim, Norm::none, 0);
        sinusoidal::Sinusoid sinusoid;
        sinusoid.layout = sinusoidal::layout_of(preset, dim, cos_first);
        std::vector<core::Turn64> turns;
        std::vector<core::Turn128> wide_turns;
        const auto frequencies =
            sinusoidal::frequencies(10000.0, std::max(1.0, sinusoidal::divisor_of(preset, dim, 0)),
                                    sinusoidal::pairs_of(sinusoid.layout));
        for (const core::DoubleDouble& frequency : frequencies) {
          wide_turns.push_back(core::turn_from_radians(frequency));
          turns.push_back(core::round_to_turn64(wide_turns.back()));
        }
        sinusoid.pairs = static_cast<int64_t>(turns.size());
        sinusoid.turns = turns.data();
        sinusoid.wide_turns = wide_turns.data();
        sinusoid.scale = 0.5;
        expect_sinusoids(given, sinusoid);
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
      ASSERT_EQ(whole[static_cast<size_t>(i)],
                core::dropout_factor<float>(dropout, static_cast<uint64_t>(i)));
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
