// Compares the portable fused multiply-add with exact sums in wider arithmetic.
#include "core/fma.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "core/scalar.h"

namespace posembed::core {
namespace {

TEST(Fma, RoundsOnceOnRandomBits) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 2'000'000; ++i) {
    const uint64_t bits = random();
    const float a = float_from_bits(static_cast<uint32_t>(bits));
    const float b = float_from_bits(static_cast<uint32_t>(bits >> 32));
    const float c = i % 2 == 0 ? float_from_bits(static_cast<uint32_t>(random())) : -a * b;
    const float expected = std::fma(a, b, c);
    const float result = fma(a, b, c);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(result)) << a << " * " << b << " + " << c;
    } else {
      ASSERT_EQ(float_bits(result), float_bits(expected)) << a << " * " << b << " + " << c;
    }
  }
}

TEST(Fma, RoundsTiesThatDoubleWouldRoundTwice) {
  // The sum is half a unit above 1 plus a part that double drops: rounding twice would give 1.
  const float a = 1 + 0x1p-12f, b = 1 + 0x1p-12f, c = -0x1p-11f + 0x1p-80f;
  EXPECT_EQ(float_bits(fma(a, b, c)), float_bits(std::fma(a, b, c)));
  EXPECT_EQ(fma(1 + 0x1p-23f, 0x1p-24f, 1.0f), 1 + 0x1p-23f);
  EXPECT_EQ(fma(0x1p-24f, 1.0f, 1.0f), 1.0f);
  EXPECT_EQ(fma(0x1p-75f, 0x1p-75f, 0x1p-149f), 0x1p-148f);  // a tie between denormals
}

TEST(Fma, KeepsInfinityAndNan) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(fma(infinity, 2.0f, 1.0f), infinity);
  EXPECT_EQ(fma(1.0f, 2.0f, -infinity), -infinity);
  EXPECT_EQ(fma(3e38f, 3e38f, 0.0f), infinity);
  EXPECT_TRUE(std::isnan(fma(infinity, 0.0f, 1.0f)));
  EXPECT_TRUE(std::isnan(fma(infinity, 1.0f, -infinity)));
}

}  // namespace
}  // namespace posembed::core
