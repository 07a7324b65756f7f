// The ALiBi CPU kernels of every instruction set against a plain loop in double precision.
#include "alibi/kernel.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "alibi/slopes.h"

namespace posembed::alibi {
namespace {

using core::Compute;

template <typename Kernel>
using Copies = std::vector<std::pair<const char*, Kernel*>>;

/// The copies of a kernel that this processor can run.
template <typename Kernel>
Copies<Kernel> copies(Kernel* baseline, [[maybe_unused]] Kernel* avx2,
                      [[maybe_unused]] Kernel* avx512) {
  Copies<Kernel> result{{"baseline", baseline}};
  const auto set = core::instruction_set();
  if (set >= core::InstructionSet::avx2) result.emplace_back("avx2", avx2);
  if (set >= core::InstructionSet::avx512) result.emplace_back("avx512", avx512);
  return result;
}

#if defined(POSEMBED_X86_VARIANTS)
#define POSEMBED_COPIES(kernel) copies(baseline::kernel, avx2::kernel, avx512::kernel)
#else
#define POSEMBED_COPIES(kernel) copies(baseline::kernel, baseline::kernel, baseline::kernel)
#endif

double expected_bias(double before, double after, const Distances& distances, int64_t row,
                     int64_t key) {
  const auto distance = static_cast<double>(distances.offset + row - key);
  if (distance >= 0) return -before * distance;
  if (!distances.causal) return after * distance;
  return distances.hide_future ? -std::numeric_limits<double>::infinity() : 0.0;
}

/// `value` as it comes out of storage in T: rounded to the type arithmetic runs in, then to T.
template <typename T>
Compute<T> rounded(double value) {
  T stored;
  core::store(static_cast<Compute<T>>(value), &stored);
  return core::load(stored);
}

struct Case {
  int64_t queries, keys, offset;
  bool causal, hide_future;
};

const Case cases[] = {
    {1, 1, 0, true, true},       {1, 7, 6, true, true},        {5, 3, -2, true, true},
    {33, 1025, 992, true, true}, {64, 65, 1, false, true},     {7, 4100, 100, false, true},
    {40, 40, 0, true, false},    {3, 5, 1 << 19, true, true},  {3, 9, -20, false, true},
    {2, 0, 0, true, true},       {2, 31, 100000, false, true},
};

const std::vector<float> two_sided = {0.5f, 0.25f, 0.7071f, 1.0f, 0.3f, 0.0625f};  // [2, 3]

template <typename T>
core::Scalar scalar_of() {
  if (std::is_same_v<T, double>) return core::Scalar::float64;
  if (std::is_same_v<T, core::BFloat16>) return core::Scalar::bfloat16;
  if (std::is_same_v<T, core::Float16>) return core::Scalar::float16;
  return core::Scalar::float32;
}

template <typename T>
class ALiBiKernel : public ::testing::Test {};

using Types = ::testing::Types<float, double, core::BFloat16, core::Float16>;
TYPED_TEST_SUITE(ALiBiKernel, Types);

TYPED_TEST(ALiBiKernel, FillsEveryRowInAnySplit) {
  using T = TypeParam;
  for (const Case& c : cases) {
    for (const auto& [name, fill] : POSEMBED_COPIES(fill)) {
      SCOPED_TRACE(testing::Message() << name << " queries " << c.queries << " keys " << c.keys);
      FillArguments arguments;
      arguments.slopes = {two_sided.data(), core::Scalar::float32, 3, 2};
      arguments.distances = {c.queries, c.keys, c.offset, c.causal, c.hide_future};
      arguments.scalar = scalar_of<T>();
      const int64_t rows = 3 * c.queries, guard = 1;
      std::vector<T> out(static_cast<size_t>(rows * c.keys + 2 * guard));
      core::store(Compute<T>(42), &out.front());
      core::store(Compute<T>(42), &out.back());
      arguments.out = out.data() + guard;
      const int64_t split = rows / 3 + 1;
      fill(arguments, 0, split);
      fill(arguments, split, rows);
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t head = row / c.queries;
        const double before = two_sided[head], after = two_sided[3 + head];
        for (int64_t key = 0; key < c.keys; ++key) {
          const auto want =
              rounded<T>(expected_bias(before, after, arguments.distances, row % c.queries, key));
          const auto have = core::load(out[guard + row * c.keys + key]);
          ASSERT_EQ(have, want) << "row " << row << " key " << key;
        }
      }
      EXPECT_EQ(core::load(out.front()), 42);
      EXPECT_EQ(core::load(out.back()), 42);
    }
  }
}

TYPED_TEST(ALiBiKernel, AddsToStridedScoresInPlace) {
  using T = TypeParam;
  constexpr int64_t batch = 2, heads = 3, padding = 5;
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(-2, 2);
  for (const Case& c : cases) {
    for (const auto& [name, add] : POSEMBED_COPIES(add)) {
      SCOPED_TRACE(testing::Message() << name << " queries " << c.queries << " keys " << c.keys);
      AddArguments arguments;
      arguments.slopes = {two_sided.data(), core::Scalar::float32, heads, 2};
      arguments.distances = {c.queries, c.keys, c.offset, c.causal, c.hide_future};
      arguments.scalar = scalar_of<T>();
      arguments.batch = batch;
      // Heads outermost and rows apart: nothing but the last dimension is contiguous.
      const int64_t row = c.keys + padding;
      const int64_t strides[3] = {c.queries * row, batch * c.queries * row, row};
      std::copy_n(strides, 3, arguments.in_stride);
      std::copy_n(strides, 3, arguments.out_stride);
      std::vector<T> scores(static_cast<size_t>(batch * heads * c.queries * row));
      for (T& score : scores) core::store(Compute<T>(uniform(random)), &score);
      const std::vector<T> before = scores;
      arguments.in = arguments.out = scores.data();
      add(arguments, 0, 4);
      add(arguments, 4, batch * heads * c.queries);
      for (int64_t place = 0; place < static_cast<int64_t>(scores.size()); ++place) {
        const int64_t key = place % row, query = place / row % c.queries;
        const int64_t head = place / strides[1];
        Compute<T> want = core::load(before[place]);
        if (key < c.keys) {
          want += static_cast<Compute<T>>(expected_bias(two_sided[head], two_sided[heads + head],
                                                        arguments.distances, query, key));
        }
        ASSERT_EQ(core::load(scores[place]), rounded<T>(want)) << "place " << place;
      }
    }
  }
}

TYPED_TEST(ALiBiKernel, ReducesToTheSameBitsOnEveryInstructionSet) {
  using T = TypeParam;
  constexpr int64_t batch = 2, heads = 3;
  std::mt19937 random(2);
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (const Case& c : cases) {
    const int64_t plane = c.queries * c.keys;
    std::vector<T> grad(static_cast<size_t>(batch * heads * plane));
    for (T& value : grad) core::store(Compute<T>(uniform(random)), &value);
    ReduceArguments arguments;
    arguments.distances = {c.queries, c.keys, c.offset, c.causal, c.hide_future};
    arguments.sides = 2;
    arguments.heads = heads;
    arguments.grad = grad.data();
    arguments.scalar = scalar_of<T>();
    arguments.batch = batch;
    const int64_t strides[3] = {heads * plane, plane, c.keys};
    std::copy_n(strides, 3, arguments.stride);
    arguments.out_scalar = core::Scalar::float64;
    std::vector<double> want(2 * heads, 0.0);
    double size = 0;
    for (int64_t place = 0; place < batch * heads * plane; ++place) {
      const int64_t key = place % c.keys, query = place / c.keys % c.queries;
      const int64_t head = place / plane % heads;
      const auto distance = static_cast<double>(key - query - c.offset);
      const double product = distance * core::load(grad[place]);
      size += std::abs(product);
      if (distance <= 0) want[head] += product;
      if (distance > 0 && !c.causal) want[heads + head] -= product;
    }
    std::vector<double> first;
    for (const auto& [name, reduce] : POSEMBED_COPIES(reduce)) {
      SCOPED_TRACE(testing::Message() << name << " queries " << c.queries << " keys " << c.keys);
      std::vector<double> out(2 * heads, 42.0);
      arguments.out = out.data();
      reduce(arguments, 0, 1);
      reduce(arguments, 1, heads);
      for (size_t i = 0; i < out.size(); ++i) EXPECT_NEAR(out[i], want[i], 1e-14 * size);
      if (first.empty()) first = out;
      EXPECT_EQ(out, first);
    }
  }
}

TEST(ALiBiSlopes, PowersOfTwo) {
  for (int64_t head = 0; head < 8; ++head) {
    EXPECT_EQ(slope(SlopeKind::press, 8.0, 8, head), std::ldexp(1.0f, -static_cast<int>(head) - 1));
  }
  EXPECT_EQ(slope(SlopeKind::press, 8.0, 16, 0), static_cast<float>(std::sqrt(0.5)));
  EXPECT_EQ(slope(SlopeKind::press, 8.0, 1, 0), 1.0f / 256);
}

TEST(ALiBiSlopes, OtherHeadCountsInterleaveThePowersAround) {
  const float expected[] = {1.0f / 16, 1.0f / 256, 1.0f / 4};
  for (int64_t head = 0; head < 3; ++head) {
    EXPECT_EQ(slope(SlopeKind::press, 8.0, 3, head), expected[head]);
  }
  EXPECT_EQ(slope(SlopeKind::press, 8.0, 12, 8), static_cast<float>(std::sqrt(0.5)));
  EXPECT_EQ(slope(SlopeKind::press, 8.0, 12, 11), static_cast<float>(std::exp2(-3.5)));
}

TEST(ALiBiSlopes, GeometricSeriesHasOneRatio) {
  EXPECT_EQ(slope(SlopeKind::geometric, 8.0, 12, 0), static_cast<float>(std::exp2(-2.0 / 3)));
  EXPECT_EQ(slope(SlopeKind::geometric, 4.0, 3, 2), 1.0f / 16);
}

TEST(ALiBiSlopes, AreCorrectlyRounded) {
  for (const auto kind : {SlopeKind::press, SlopeKind::geometric}) {
    for (int64_t heads = 1; heads <= 256; ++heads) {
      for (int64_t head = 0; head < heads; ++head) {
        int64_t power = 1;
        while (2 * power <= heads) power *= 2;
        long double exponent = -8.0L * (head + 1) / heads;
        if (kind == SlopeKind::press) {
          exponent = head < power ? -8.0L * (head + 1) / power
                                  : -8.0L * (2 * (head - power) + 1) / (2 * power);
        }
        ASSERT_EQ(slope(kind, 8.0, heads, head), static_cast<float>(std::exp2(exponent)))
            << heads << " heads, head " << head;
      }
    }
  }
}

}  // namespace
}  // namespace posembed::alibi
