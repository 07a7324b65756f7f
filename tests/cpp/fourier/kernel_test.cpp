// Tests the CPU kernel against exact arithmetic: turns that are whole numbers over a power of two,
// reduced with integers.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "fourier/fourier.h"
#include "values.h"

namespace posembed::fourier {
namespace {

__extension__ using Wide = __int128;

using Types = ::testing::Types<float, double, core::BFloat16, core::Float16>;

constexpr int64_t rows = 40, terms = 3, count = 37;
constexpr int bits = 30;  // of frequencies, behind the point

template <typename T>
class FourierKernel : public testing::Test {
 protected:
  FourierKernel() {
    std::mt19937_64 random(1);
    for (int64_t i = 0; i < terms * count; ++i) {  // whole turns too, of either sign
      frequencies.push_back(std::ldexp(static_cast<double>(numerator(random, 50)), -bits));
    }
    for (int64_t i = 0; i < rows * terms; ++i) coordinates.push_back(numerator(random, 2 + i % 61));
    arguments.frequencies = {frequencies.data(), true, {}, core::Scalar::float64};
    arguments.coordinates.data = coordinates.data();
    arguments.unit = 1;
    arguments.scalar = scalar_of<T>();
    arguments.rows = rows;
    arguments.terms = terms;
    arguments.count = count;
    arguments.columns = 2 * count;
    arguments.count_step = 1;
    arguments.cosine = count;
    out.resize(static_cast<size_t>(rows * 2 * count));
    arguments.out = out.data();
  }

  static int64_t numerator(std::mt19937_64& random, int64_t size) {
    return static_cast<int64_t>(random()) >> (63 - size);
  }

  /// Runs the kernel in two parts and compares; coordinates are times 2^-`shift`.
  void check(int shift) {
    encode_cpu(arguments, 0, 7);
    encode_cpu(arguments, 7, rows);
    const double limit[] = {2e-7, 1e-15, 0x1p-8, 0x1p-11};
    for (int64_t i = 0; i < rows * count; ++i) {
      Wide sum = 0;  // in units of 2^-(bits + shift), which wrap at a power of two
      for (int64_t term = 0; term < terms; ++term) {
        const double rate = frequencies[static_cast<size_t>(term * count + i % count)];
        sum += static_cast<Wide>(coordinates[static_cast<size_t>(i / count * terms + term)]) *
               static_cast<int64_t>(std::ldexp(rate, bits));
      }
      const int unit = bits + shift;
      const Wide part = sum & ((static_cast<Wide>(1) << unit) - 1);
      const long double angle = 2 * std::acos(-1.0L) * std::ldexp(static_cast<long double>(part), -unit);
      const int64_t place = i / count * 2 * count + i % count;
      const double error = limit[static_cast<int>(arguments.scalar)];
      ASSERT_NEAR(at(out, place), static_cast<double>(std::sin(angle)), error) << i;
      ASSERT_NEAR(at(out, place + count), static_cast<double>(std::cos(angle)), error) << i;
    }
  }

  std::vector<double> frequencies;
  std::vector<int64_t> coordinates;
  std::vector<T> out;
  Arguments arguments;
};

TYPED_TEST_SUITE(FourierKernel, Types);

TYPED_TEST(FourierKernel, WholeCoordinates) { this->check(0); }

TYPED_TEST(FourierKernel, FractionsOfCoordinates) {
  for (int64_t& number : this->coordinates) number = number / 1024 * 1024;  // 53 bits
  for (const int shift : {21, 70}) {
    std::vector<double> fractions;
    for (const int64_t number : this->coordinates) {
      fractions.push_back(std::ldexp(static_cast<double>(number), -shift));
    }
    this->arguments.coordinates = {fractions.data(), true, {}, core::Scalar::float64};
    ASSERT_NO_FATAL_FAILURE(this->check(shift));
  }
}

}  // namespace
}  // namespace posembed::fourier
