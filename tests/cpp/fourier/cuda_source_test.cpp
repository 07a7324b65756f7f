// Tests the source of the CUDA kernel, run on the CPU by tests/cpp/cuda_on_cpu: it gives the bits
// of the CPU kernel. Needs no GPU.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

// Renamed, because the library may contain the real launcher.
#define encode_cuda encode_cuda_on_cpu
#include "fourier/fourier_cuda.cu"
#include "values.h"

namespace posembed::fourier {
namespace {

using Types = ::testing::Types<float, double, core::BFloat16, core::Float16>;

/// Numbers of either sign and of many magnitudes; one of them is not finite.
template <typename T>
std::vector<T> spread(int64_t count) {
  std::mt19937 random(1);
  std::uniform_real_distribution<double> power(-40, 45);
  std::vector<T> numbers;
  for (int64_t i = 0; i < count; ++i) {
    const double size = std::exp2(power(random));
    numbers.push_back(static_cast<T>(i % 2 == 0 ? size : -size));
  }
  if (count > 5) numbers[5] = static_cast<T>(NAN);
  return numbers;
}

template <typename T>
core::PositionView view(const std::vector<T>& numbers) {
  core::PositionView view;
  view.data = numbers.data();
  view.floating = std::is_floating_point_v<T>;
  view.scalar = std::is_same_v<T, double> ? core::Scalar::float64 : core::Scalar::float32;
  view.index = sizeof(T) == 4 ? core::Index::int32 : core::Index::int64;
  return view;
}

/// Runs both kernels and compares the memory afterwards.
template <typename T>
void check(Arguments arguments, bool adds) {
  const auto size = static_cast<size_t>(arguments.rows * arguments.columns);
  std::vector<T> in(size), expected(size), out(size);
  for (size_t i = 0; i < size; ++i) core::store(static_cast<core::Compute<T>>(i % 7), &in[i]);
  arguments.scalar = scalar_of<T>();
  arguments.in = adds ? in.data() : nullptr;
  arguments.out = expected.data();
  encode_cpu(arguments, 0, arguments.rows * arguments.groups);
  arguments.out = out.data();
  ASSERT_EQ(encode_cuda(arguments, nullptr), nullptr);
  ASSERT_EQ(memcmp(out.data(), expected.data(), size * sizeof(T)), 0);
}

template <typename T>
class FourierGpuSource : public testing::Test {};

TYPED_TEST_SUITE(FourierGpuSource, Types);

TYPED_TEST(FourierGpuSource, SumsOverAxes) {
  const std::vector<double> coordinates = spread<double>(21 * 3);
  const std::vector<float> frequencies = spread<float>(3 * 300), phases = spread<float>(300);
  Arguments arguments;
  arguments.coordinates = view(coordinates);
  arguments.frequencies = view(frequencies);
  arguments.phases = view(phases);
  arguments.rows = 21;
  arguments.terms = 3;
  arguments.count = 300;
  arguments.columns = 600;
  arguments.count_step = 2;
  arguments.sine = 1;
  for (const double unit : {0.0, 0.5, 1.0}) {
    arguments.unit = unit;
    arguments.derivative = unit == 1 ? 3 : 0;
    ASSERT_NO_FATAL_FAILURE(check<TypeParam>(arguments, unit == 0));
  }
}

TYPED_TEST(FourierGpuSource, AxesApart) {
  const std::vector<int64_t> coordinates = {0, -1, INT64_MAX, INT64_MIN, 7, 1700000000, 3, 4};
  const std::vector<double> frequencies = spread<double>(2 * 5);
  Arguments arguments;
  arguments.coordinates = view(coordinates);
  arguments.frequencies = view(frequencies);
  arguments.unit = 0.5;
  arguments.rows = 4;
  arguments.terms = 2;
  arguments.count = 5;
  arguments.groups = 2;
  arguments.apart = true;
  arguments.columns = 10;
  arguments.group_step = 1;
  arguments.count_step = 2;
  arguments.sine = -1;
  check<TypeParam>(arguments, true);
}

}  // namespace
}  // namespace posembed::fourier
