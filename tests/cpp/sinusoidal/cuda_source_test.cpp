// Tests the source of the CUDA kernels, run on the CPU by tests/cpp/cuda_on_cpu: it gives the bits
// of the CPU kernel, in packs of every width, and writes nothing outside the rows. Needs no GPU.
#include <cuda_runtime.h>

#include <cmath>
#include <numeric>
#include <random>

// Renamed, because the library may contain the real launcher.
#define encode_cuda encode_cuda_on_cpu
#include "sinusoidal/problems.h"
#include "sinusoidal/sinusoidal_cuda.cu"

namespace posembed::sinusoidal {
namespace {

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

template <typename T>
std::vector<T> random_numbers(size_t count) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(-2, 2);
  std::vector<T> numbers(count);
  for (T& number : numbers) core::store(Compute<T>(uniform(random)), &number);
  return numbers;
}

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

template <typename T>
class SinusoidalGpuSource : public testing::Test {};

TYPED_TEST_SUITE(SinusoidalGpuSource, Types);

TYPED_TEST(SinusoidalGpuSource, EveryLayout) {
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

TYPED_TEST(SinusoidalGpuSource, MorePairsThanOneLaunchCarries) {
  const Encoding encoding(Preset::vaswani, 2 * max_pairs<TypeParam> + 12, 10000, 0, false);
  Arguments arguments;
  arguments.sinusoid = encoding.sinusoid;
  check<TypeParam>(arguments, {2, 2, encoding.sinusoid.layout.columns, 0, 0}, true, false);
}

TYPED_TEST(SinusoidalGpuSource, PositionsOfEveryTypeSharedOrNot) {
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

TYPED_TEST(SinusoidalGpuSource, LearnedScale) {
  const Encoding encoding(Preset::marian, 24, 10000, 0, false);
  const float scale = -1.75f;
  Arguments arguments;
  arguments.sinusoid = encoding.sinusoid;
  arguments.sinusoid.learned_scale = &scale;
  check<TypeParam>(arguments, {1, 5, 24, 0, 0}, true, false);
}

/// The blocks of 32 threads that a launch has on the pretended device.
int64_t max_blocks() { return int64_t{pretended_multiprocessors} * resident_blocks * max_threads / core::warp_size; }

/// A block goes on with another encoding, with and without a rest of the rows that it reads
/// together.
TYPED_TEST(SinusoidalGpuSource, MoreEncodingsThanBlocks) {
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

TYPED_TEST(SinusoidalGpuSource, ManySequencesOfFewTokens) {
  const Encoding encoding(Preset::vaswani, 8, 10000, 0, false);
  Arguments arguments;
  arguments.sinusoid = encoding.sinusoid;
  check<TypeParam>(arguments, {4 * max_blocks() + 5, 1, 8, 0, 0}, true, false);
  check<TypeParam>(arguments, {7, max_blocks() / 4, 8, 0, 0}, true, false);
}

TYPED_TEST(SinusoidalGpuSource, Nothing) {
  const Encoding encoding(Preset::tensor2tensor, 9, 10000, 0, false);
  Arguments arguments;
  arguments.sinusoid = encoding.sinusoid;
  check<TypeParam>(arguments, {0, 3, 9, 0, 0}, true, false);
  check<TypeParam>(arguments, {3, 0, 9, 0, 0}, true, false);
}

}  // namespace
}  // namespace posembed::sinusoidal
