// Compares the sinusoidal CPU kernels of every instruction set with sines and cosines in long
// double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "copies.h"
#include "sinusoidal/problems.h"

namespace posembed::sinusoidal {
namespace {

using Kernel = void(const Arguments&, int64_t, int64_t);

/// The copies of the kernel that this processor can run.
std::vector<std::pair<const char*, Kernel*>> copies() {
  std::vector<std::pair<const char*, Kernel*>> result;
  POSEMBED_ADD_COPIES(result, isa::encode)
  return result;
}

/// The columns of the presets, as in the papers and the original code.
long double expected(Preset preset, int64_t dim, double base, double shift, bool cos_first, int64_t column,
                     long double position) {
  const int64_t whole_half = dim / 2;
  int64_t pair = column / 2;
  bool cosine = column % 2 == 1;
  long double exponent = 2.0L * pair / (dim - 2 * shift);
  if (preset == Preset::marian) {
    const int64_t sines = (dim + 1) / 2;
    cosine = column >= sines;
    pair = cosine ? column - sines : column;
    exponent = 2.0L * pair / (dim - 2 * shift);
  }
  if (preset == Preset::tensor2tensor) {
    if (column == 2 * whole_half) return 0;
    cosine = column >= whole_half;
    pair = cosine ? column - whole_half : column;
    exponent = pair / (whole_half - static_cast<long double>(shift));
  }
  if (pair == 0) exponent = 0;
  const long double angle = position * std::pow(static_cast<long double>(base), -exponent);
  return cosine != cos_first ? std::cos(angle) : std::sin(angle);
}

double tolerance(core::Scalar scalar) {
  switch (scalar) {
    case core::Scalar::float64:
      return 1e-15;
    case core::Scalar::bfloat16:
      return 0x1p-9 + 1.5e-7;  // half a unit in the last place of 1
    case core::Scalar::float16:
      return 0x1p-12 + 1.5e-7;
    default:
      return 1.5e-7;
  }
}

template <typename T>
class SinusoidalKernel : public ::testing::Test {};

TYPED_TEST_SUITE(SinusoidalKernel, Types);

TYPED_TEST(SinusoidalKernel, WritesThePresets) {
  using T = TypeParam;
  for (const Preset preset : {Preset::vaswani, Preset::marian, Preset::tensor2tensor}) {
    for (const int64_t dim : {1, 2, 3, 4, 7, 64, 513, 1030}) {
      for (const bool cos_first : {false, true}) {
        const double shift = preset == Preset::tensor2tensor ? 1 : 0;
        const Encoding encoding(preset, dim, 10000, shift, cos_first);
        for (const auto& [name, encode] : copies()) {
          SCOPED_TRACE(testing::Message() << name << " preset " << static_cast<int>(preset) << " dim " << dim
                                          << " cos_first " << cos_first);
          std::vector<T> out;
          Arguments arguments = rows(encoding.sinusoid, 1, 5, out);
          arguments.offset = 500;
          encode(arguments, 0, 2);
          encode(arguments, 2, 5);
          for (int64_t index = 0; index < 5 * dim; ++index) {
            const long double want = expected(preset, dim, 10000, shift, cos_first, index % dim, 500 + index / dim);
            ASSERT_NEAR(core::load(out[index]), static_cast<double>(want), tolerance(arguments.scalar))
                << "index " << index;
          }
        }
      }
    }
  }
}

TYPED_TEST(SinusoidalKernel, AddsToTheWholeBatchInPlaceAndAside) {
  using T = TypeParam;
  constexpr int64_t batch = 3, seq = 4, dim = 37;
  const Encoding encoding(Preset::vaswani, dim, 10000, 0, false);
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(-2, 2);
  std::vector<T> x(batch * seq * dim);
  for (T& value : x) core::store(Compute<T>(uniform(random)), &value);
  const int32_t positions[] = {7, -3, 0, 1000};
  for (const auto& [name, encode] : copies()) {
    SCOPED_TRACE(name);
    std::vector<T> values, aside, in_place;
    Arguments alone = rows(encoding.sinusoid, batch, seq, values);
    alone.positions = {positions, false, core::Index::int32, core::Scalar::float32};
    alone.position_stride[1] = 1;
    encode(alone, 0, encodings(alone));
    Arguments adding = rows(encoding.sinusoid, batch, seq, aside);
    adding.positions = alone.positions;
    adding.position_stride[1] = 1;
    adding.in = x.data();
    encode(adding, 0, encodings(adding));
    in_place = x;
    adding.in = adding.out = in_place.data();
    encode(adding, 0, encodings(adding));
    for (size_t i = 0; i < x.size(); ++i) {
      const double unit = tolerance(alone.scalar);
      ASSERT_NEAR(core::load(aside[i]), core::load(x[i]) + core::load(values[i]), 4 * unit);
      ASSERT_EQ(core::load(aside[i]), core::load(in_place[i]));
      ASSERT_EQ(core::load(values[i]), core::load(values[i % (seq * dim)]));
    }
  }
}

/// Sums must depend neither on which rows are processed together nor on how many share an encoding.
TYPED_TEST(SinusoidalKernel, GroupsOfSequencesGiveWhatEachAloneGives) {
  using T = TypeParam;
  constexpr int64_t batch = 11, seq = 3;
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(-2, 2);
  for (const Preset preset : {Preset::vaswani, Preset::marian}) {
    for (const int64_t dim : {64, 1024, 1291}) {
      const Encoding encoding(preset, dim, 10000, 0, false);
      std::vector<T> x(batch * seq * dim);
      for (T& value : x) core::store(Compute<T>(uniform(random)), &value);
      for (const auto& [name, encode] : copies()) {
        std::vector<T> alone;
        Arguments one = rows(encoding.sinusoid, batch, seq, alone);
        one.batch = 1;
        for (int64_t b = 0; b < batch; ++b) {
          one.in = x.data() + b * seq * dim;
          one.out = alone.data() + b * seq * dim;
          encode(one, 0, seq);
        }
        for (const int64_t groups : {1, 2, 3}) {
          SCOPED_TRACE(testing::Message() << name << " dim " << dim << " groups " << groups);
          std::vector<T> out;
          Arguments grouped = rows(encoding.sinusoid, batch, seq, out);
          grouped.in = x.data();
          grouped.groups = groups;
          ASSERT_EQ(encodings(grouped), groups * seq);
          encode(grouped, 0, 2);
          encode(grouped, 2, encodings(grouped));
          for (size_t i = 0; i < out.size(); ++i) {
            ASSERT_EQ(core::load(out[i]), core::load(alone[i])) << "index " << i;
          }
        }
      }
    }
  }
}

/// Outputs this large use non-temporal stores.
TYPED_TEST(SinusoidalKernel, StreamedSumsAreThoseOfSmallParts) {
  using T = TypeParam;
  constexpr int64_t batch = 5, seq = 2048, dim = 448;
  const Encoding encoding(Preset::vaswani, dim, 10000, 0, false);
  const std::vector<T> x(batch * seq * dim);
  for (const auto& [name, encode] : copies()) {
    SCOPED_TRACE(name);
    std::vector<T> memory, parts;
    Arguments arguments = rows(encoding.sinusoid, batch, seq, memory);
    memory.resize(x.size() + 64);
    const auto address = reinterpret_cast<uintptr_t>(memory.data());
    T* whole = memory.data() + (64 - address % 64) % 64 / sizeof(T);
    arguments.in = x.data();
    arguments.out = whole;
    encode(arguments, 0, seq);
    Arguments small = rows(encoding.sinusoid, batch, seq, parts);
    small.in = x.data();
    for (int64_t begin = 0; begin < seq; begin += 256) encode(small, begin, begin + 256);
    ASSERT_EQ(std::memcmp(whole, parts.data(), parts.size() * sizeof(T)), 0);
  }
}

TEST(SinusoidalKernel, PaddingIsZeroAndOthersFollow) {
  constexpr int64_t dim = 70;
  const Encoding encoding(Preset::tensor2tensor, dim, 10000, 1, false);
  const int64_t positions[] = {-1, 0, 41, -2, -1}, shifted[] = {0, 3, 44, 1, 0};
  for (const auto& [name, encode] : copies()) {
    std::vector<float> out, plain;
    Arguments padded = rows(encoding.sinusoid, 1, 5, out);
    padded.sinusoid.first = 3;
    padded.positions = {positions, false, core::Index::int64, core::Scalar::float32};
    Arguments others = rows(encoding.sinusoid, 1, 5, plain);
    others.positions = {shifted, false, core::Index::int64, core::Scalar::float32};
    padded.position_stride[1] = others.position_stride[1] = 1;
    encode(padded, 0, 5);
    encode(others, 0, 5);
    for (size_t index = 0; index < out.size(); ++index) {
      const bool padding = positions[index / dim] == -1;
      ASSERT_EQ(out[index], padding ? 0.0f : plain[index]) << name << " index " << index;
    }
  }
}

TEST(SinusoidalKernel, IsExactAtLargeIntegerPositions) {
  constexpr int64_t dim = 128;
  const Encoding encoding(Preset::vaswani, dim, 10000, 0, false);
  const int64_t positions[] = {131072, 1048576, 16777217, 2147483647, -2147483647};
  for (const auto& [name, encode] : copies()) {
    std::vector<float> out;
    Arguments arguments = rows(encoding.sinusoid, 1, 5, out);
    arguments.positions = {positions, false, core::Index::int64, core::Scalar::float32};
    arguments.position_stride[1] = 1;
    encode(arguments, 0, 5);
    for (int64_t index = 0; index < 5 * dim; ++index) {
      const auto position = static_cast<long double>(positions[index / dim]);
      const auto want = static_cast<double>(expected(Preset::vaswani, dim, 10000, 0, false, index % dim, position));
      ASSERT_NEAR(out[index], want, 1.5e-7) << name << " index " << index;
    }
  }
}

TEST(SinusoidalKernel, TakesFractionalPositionsOfEveryType) {
  constexpr int64_t dim = 64;
  const Encoding encoding(Preset::tensor2tensor, dim, 10000, 1, true);
  const double positions[] = {0.5, -0.25, 998.3897, 1e6 + 1.0 / 3, 3.0};
  std::vector<float> single(positions, positions + 5);
  for (const auto& [name, encode] : copies()) {
    SCOPED_TRACE(name);
    for (const bool wide : {true, false}) {
      std::vector<double> out;
      Arguments arguments = rows(encoding.sinusoid, 1, 5, out);
      arguments.positions.floating = true;
      arguments.positions.data = wide ? static_cast<const void*>(positions) : single.data();
      arguments.positions.scalar = wide ? core::Scalar::float64 : core::Scalar::float32;
      arguments.position_stride[1] = 1;
      encode(arguments, 0, 5);
      for (int64_t index = 0; index < 5 * dim; ++index) {
        const double position = wide ? positions[index / dim] : single[index / dim];
        const auto want =
            static_cast<double>(expected(Preset::tensor2tensor, dim, 10000, 1, true, index % dim, position));
        // long double itself is uncertain by 1e6 * 2^-64.
        ASSERT_NEAR(out[index], want, 1e-15 + 1e-19 * std::abs(position) * 2) << index;
      }
    }
  }
}

TEST(SinusoidalKernel, GivesNaNForPositionsThatAreNone) {
  const Encoding encoding(Preset::vaswani, 6, 10000, 0, false);
  const float positions[] = {NAN, INFINITY, -INFINITY, 1e30f};
  for (const auto& [name, encode] : copies()) {
    std::vector<float> out;
    Arguments arguments = rows(encoding.sinusoid, 1, 4, out);
    arguments.positions.floating = true;
    arguments.positions.data = positions;
    arguments.position_stride[1] = 1;
    encode(arguments, 0, 4);
    EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](float v) { return std::isnan(v); })) << name;
  }
}

TEST(SinusoidalKernel, DerivativesTakeTurns) {
  constexpr int64_t dim = 10;
  Encoding encoding(Preset::marian, dim, 100, 0, false);
  encoding.sinusoid.scale = 2;
  const double position = 1.75;
  for (const auto& [name, encode] : copies()) {
    for (int64_t order = 0; order <= 5; ++order) {
      encoding.sinusoid.order = order;
      std::vector<double> out;
      Arguments arguments = rows(encoding.sinusoid, 1, 1, out);
      arguments.positions.floating = true;
      arguments.positions.scalar = core::Scalar::float64;
      arguments.positions.data = &position;
      encode(arguments, 0, 1);
      for (int64_t column = 0; column < dim; ++column) {
        const int64_t pair = column % 5;
        const double frequency = std::pow(100.0, -pair / 5.0);
        const double quarter = std::acos(0.0), angle = position * frequency + quarter * order;
        const double wave = column < 5 ? std::sin(angle) : std::cos(angle);
        ASSERT_NEAR(out[column], 2 * std::pow(frequency, order) * wave, 1e-14)
            << name << " order " << order << " column " << column;
      }
    }
  }
}

TEST(SinusoidalKernel, EveryInstructionSetGivesTheSameBits) {
  const Encoding encoding(Preset::vaswani, 770, 10000, 0, false);
  std::vector<std::vector<float>> results;
  for (const auto& [name, encode] : copies()) {
    Arguments arguments = rows(encoding.sinusoid, 1, 300, results.emplace_back());
    arguments.offset = 1 << 30;
    encode(arguments, 0, 300);
    EXPECT_EQ(results.back(), results.front()) << name;
  }
}

TEST(SinusoidalFrequencies, OneFrequencyNeedsNoDivisor) {
  for (const double divisor : {1.0, 0.0, -1.0}) {
    const auto result = frequencies(10000, divisor, 1);
    ASSERT_EQ(result.size(), 1u);
    EXPECT_EQ(core::to_double(result[0]), 1.0);
  }
}

TEST(SinusoidalFrequencies, ReachTheirEnds) {
  const auto result = frequencies(10000, divisor_of(Preset::tensor2tensor, 64, 1), 32);
  EXPECT_EQ(core::to_double(result.front()), 1.0);
  EXPECT_EQ(core::to_double(result.back()), 1e-4);
}

}  // namespace
}  // namespace posembed::sinusoidal
