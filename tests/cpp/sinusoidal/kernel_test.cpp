// Compares the sinusoidal kernels of every instruction set, and the source of the CUDA kernel, run on the CPU by
// tests/cpp/cuda_on_cpu, with sines and cosines in long double. Needs no GPU.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

// Renamed, because the library may contain the real launcher.
#define encode_cuda encode_cuda_on_cpu
#include "copies.h"
#include "sinusoidal/problems.h"
#include "sinusoidal/sinusoidal_cuda.cu"

namespace posembed::sinusoidal {
namespace {

using Kernel = void(const Arguments&, int64_t, int64_t);

/// The copies of the kernel that this processor can run.
std::vector<std::pair<const char*, Kernel*>> copies() {
  std::vector<std::pair<const char*, Kernel*>> result;
  POSEMBED_ADD_COPIES(result, isa::encode)
  return result;
}

void encode_source(const Arguments& arguments, int64_t, int64_t end) {
  if (end != encodings(arguments)) return;  // launches take no range of encodings
  ASSERT_EQ(encode_cuda(arguments, nullptr), nullptr);
}

std::vector<std::pair<const char*, Kernel*>> variants() {
  auto result = copies();
  result.emplace_back("cuda source", encode_source);
  return result;
}

template <typename T>
std::vector<T> random_numbers(size_t count) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(-2, 2);
  std::vector<T> numbers(count);
  for (T& number : numbers) core::store(Compute<T>(uniform(random)), &number);
  return numbers;
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
        for (const auto& [name, encode] : variants()) {
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
  const auto x = random_numbers<T>(batch * seq * dim);
  const int32_t positions[] = {7, -3, 0, 1000};
  for (const auto& [name, encode] : variants()) {
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
  for (const Preset preset : {Preset::vaswani, Preset::marian}) {
    for (const int64_t dim : {64, 1024, 1291}) {
      const Encoding encoding(preset, dim, 10000, 0, false);
      const auto x = random_numbers<T>(static_cast<size_t>(batch * seq * dim));
      for (const auto& [name, encode] : variants()) {
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
  for (const auto& [name, encode] : variants()) {
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
  for (const auto& [name, encode] : variants()) {
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
  for (const auto& [name, encode] : variants()) {
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
  for (const auto& [name, encode] : variants()) {
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
  for (const auto& [name, encode] : variants()) {
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

// -------------------------------------------------------------------------------- the CUDA source

/// Rows inside a larger block of numbers: [seq, batch, dim + padding], `shift` elements from the
/// first.
struct Strided {
  int64_t batch, seq, dim, padding, shift;

  size_t size() const { return static_cast<size_t>(batch * seq * (dim + padding) + shift + 8); }

  void set_strides(int64_t* stride) const {
    stride[0] = dim + padding;
    stride[1] = batch * (dim + padding);
  }
};

/// Runs both kernels on copies of the same numbers and compares the memory afterwards.
template <typename T>
void check(Arguments arguments, const Strided& form, bool adds, bool in_place) {
  const auto x = random_numbers<T>(form.size());
  std::vector<T> expected = x, out = x;
  arguments.scalar = scalar_of<T>();
  arguments.batch = form.batch;
  arguments.seq = form.seq;
  form.set_strides(arguments.in_stride);
  form.set_strides(arguments.out_stride);
  arguments.in = adds ? (in_place ? expected.data() : x.data()) + form.shift : nullptr;
  arguments.out = expected.data() + form.shift;
  encode_cpu(arguments, 0, encodings(arguments));
  if (in_place && adds) arguments.in = out.data() + form.shift;
  arguments.out = out.data() + form.shift;
  ASSERT_EQ(encode_cuda(arguments, nullptr), nullptr);
  ASSERT_EQ(memcmp(out.data(), expected.data(), out.size() * sizeof(T)), 0)
      << "dim " << form.dim << ", padding " << form.padding << ", shift " << form.shift << (adds ? ", added" : "")
      << (in_place ? " in place" : "");
}

TYPED_TEST(SinusoidalKernel, EveryLayout) {
  for (const Preset preset : {Preset::vaswani, Preset::marian, Preset::tensor2tensor}) {
    for (const int64_t dim : {1, 2, 3, 7, 8, 16, 63, 64, 300, 1032}) {
      for (const int64_t padding : {0, 8, 4, 2, 3}) {
        const Encoding encoding(preset, dim, 10000, 0, padding == 3);
        Arguments arguments;
        arguments.sinusoid = encoding.sinusoid;
        arguments.sinusoid.scale = 0.5;
        arguments.offset = 500;
        for (const int64_t shift : {0, 1, 2, 4}) {
          const Strided form{2, 3, dim, padding, shift};
          ASSERT_NO_FATAL_FAILURE(check<TypeParam>(arguments, form, false, false));
          ASSERT_NO_FATAL_FAILURE(check<TypeParam>(arguments, form, true, false));
          ASSERT_NO_FATAL_FAILURE(check<TypeParam>(arguments, form, true, true));
        }
      }
    }
  }
}

TYPED_TEST(SinusoidalKernel, MorePairsThanOneLaunchCarries) {
  const Encoding encoding(Preset::vaswani, 2 * max_pairs<TypeParam> + 12, 10000, 0, false);
  Arguments arguments;
  arguments.sinusoid = encoding.sinusoid;
  check<TypeParam>(arguments, {2, 2, encoding.sinusoid.layout.columns, 0, 0}, true, false);
}

TYPED_TEST(SinusoidalKernel, PositionsOfEveryTypeSharedOrNot) {
  const Encoding encoding(Preset::vaswani, 48, 10000, 0, false);
  const int32_t narrow[] = {7, -3, 0, 1000, 2147483647, -1};
  const int64_t whole[] = {7, -3, 0, int64_t{1} << 40, 2147483647, -1};
  const float single[] = {0.5f, NAN, -0.25f, INFINITY, 998.3897f, 1e30f};
  const double fractional[] = {0.5, 1e6 + 1.0 / 3, -0.25, 3, 1e19, -1};
  const core::BFloat16 bfloat[] = {{0x3f40}, {0}, {0xc120}, {0x7f80}, {0x4479}, {1}};
  const PositionView views[] = {{narrow, false, core::Index::int32, {}},
                                {whole, false, core::Index::int64, {}},
                                {single, true, {}, core::Scalar::float32},
                                {fractional, true, {}, core::Scalar::float64},
                                {bfloat, true, {}, core::Scalar::bfloat16}};
  for (const PositionView& view : views) {
    for (const bool shared : {false, true}) {
      for (int64_t order = 0; order < 3; ++order) {
        Arguments arguments;
        arguments.sinusoid = encoding.sinusoid;
        arguments.sinusoid.order = order;
        arguments.sinusoid.first = shared ? 0 : 2;
        arguments.positions = view;
        arguments.position_stride[0] = shared ? 0 : 3;
        arguments.position_stride[1] = 1;
        ASSERT_NO_FATAL_FAILURE(check<TypeParam>(arguments, {2, 3, 48, 0, 0}, true, false));
      }
    }
  }
}

/// The blocks of 32 threads that a launch has on the pretended device.
int64_t max_blocks() { return int64_t{pretended_multiprocessors} * resident_blocks * max_threads / core::warp_size; }

/// A block goes on with another encoding, with and without a rest of the rows that it reads
/// together.
TYPED_TEST(SinusoidalKernel, MoreEncodingsThanBlocks) {
  std::vector<int64_t> positions(size_t(2 * max_blocks()));
  std::iota(positions.begin(), positions.end(), -7);
  for (const int64_t dim : {7, 16}) {
    const Encoding encoding(Preset::vaswani, dim, 10000, 0, false);
    Arguments arguments;
    arguments.sinusoid = encoding.sinusoid;
    for (const int64_t batch : {1, 2, 3, 5}) {
      const Strided form{batch, max_blocks() * 2 + 3, dim, 0, 0};
      ASSERT_NO_FATAL_FAILURE(check<TypeParam>(arguments, form, false, false));
      ASSERT_NO_FATAL_FAILURE(check<TypeParam>(arguments, form, true, true));
    }
    arguments.positions = {positions.data(), false, core::Index::int64, {}};
    arguments.position_stride[0] = max_blocks() / 3;
    arguments.position_stride[1] = 1;
    check<TypeParam>(arguments, {5, max_blocks() / 3, dim, 0, 0}, true, false);
  }
}

TYPED_TEST(SinusoidalKernel, ManySequencesOfFewTokens) {
  const Encoding encoding(Preset::vaswani, 8, 10000, 0, false);
  Arguments arguments;
  arguments.sinusoid = encoding.sinusoid;
  check<TypeParam>(arguments, {4 * max_blocks() + 5, 1, 8, 0, 0}, true, false);
  check<TypeParam>(arguments, {7, max_blocks() / 4, 8, 0, 0}, true, false);
}

}  // namespace
}  // namespace posembed::sinusoidal
