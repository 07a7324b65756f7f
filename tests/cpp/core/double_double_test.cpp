// Compares double-double arithmetic with constants computed to 80 digits.
#include "core/double_double.h"

#include <gtest/gtest.h>

#include <cmath>

namespace posembed::core {
namespace {

/// |a - b| relative to |b|; the difference of the parts is exact when a and b are close.
double relative_error(DoubleDouble a, DoubleDouble b) {
  return std::fabs(((a.high - b.high) + (a.low - b.low)) / b.high);
}

struct Value {
  double argument;
  DoubleDouble result;
};

TEST(DoubleDouble, DividesAndMultiplies) {
  const DoubleDouble third = DoubleDouble(1.0) / 3.0;
  EXPECT_LE(relative_error(third, {0x1.5555555555555p-2, 0x1.5555555555555p-56}), 0x1p-104);
  EXPECT_LE(relative_error(third * 3.0, 1.0), 0x1p-103);
  const DoubleDouble pi = constants::two_pi / 2.0;
  EXPECT_LE(relative_error(pi * pi, {0x1.3bd3cc9be45dep+3, 0x1.692b71366cc04p-51}), 0x1p-103);
}

TEST(DoubleDouble, SumsWithoutLoss) {
  const DoubleDouble sum = DoubleDouble(1.0) + 0x1p-100;
  EXPECT_EQ(sum.high, 1.0);
  EXPECT_EQ(sum.low, 0x1p-100);
  EXPECT_TRUE(sum - 1.0 == DoubleDouble(0x1p-100));
}

TEST(DoubleDouble, Exponentials) {
  const Value values[] = {
      {0.0, 1.0},
      {1.0, {0x1.5bf0a8b145769p+1, 0x1.4d57ee2b1013ap-53}},
      {-0.5, {0x1.368b2fc6f960ap-1, -0x1.85314b9559e64p-61}},
      {10.25, {0x1.b9ea2aed2a0f1p+14, 0x1.c639d5d11309ap-40}},
      {-100.0, {0x1.a8c1f14e2af5dp-145, -0x1.43089bb228e2cp-199}},
      {300.5, {0x1.719c25b8f5b4ap+433, 0x1.cb1412eb93c85p+373}},
  };
  for (const Value& value : values) {
    EXPECT_LE(relative_error(exp(value.argument), value.result), 0x1p-99) << value.argument;
  }
}

TEST(DoubleDouble, Logarithms) {
  const Value values[] = {
      {2.0, {0x1.62e42fefa39efp-1, 0x1.abc9e3b39803fp-56}},  {1e4, {0x1.26bb1bbb55516p+3, -0x1.f48ad494ea3e9p-51}},
      {5e5, {0x1.a3ea669a05c01p+3, 0x1.43d1720303e20p-51}},  {1e7, {0x1.01e3b843eaa73p+4, -0x1.6bf2f40499ed8p-51}},
      {0.3, {-0x1.34378fcbda721p+0, 0x1.9c1404e27f13dp-54}},
  };
  for (const Value& value : values) {
    EXPECT_LE(relative_error(log(value.argument), value.result), 0x1p-100) << value.argument;
  }
  EXPECT_EQ(log(1.0).high, 0.0);
}

TEST(DoubleDouble, RadiansBecomeTurns) {
  const Turn128 one = turn_from_radians(1.0);
  EXPECT_EQ(one.high, 0x28be60db9391054au);
  // Two doubles hold 2 pi to fewer than 128 bits, so about the last 20 bits of the fraction may
  // differ.
  EXPECT_NEAR(static_cast<double>(one.low), static_cast<double>(0x7f09d5f47d4d3770u), 0x1p24);

  const Turn128 half = turn_from_radians(constants::two_pi / 2.0);
  EXPECT_EQ(half.high, 0x8000000000000000u);
  EXPECT_EQ(half.low, 0u);
  const Turn128 five_halves = turn_from_radians(constants::two_pi * 2.5);
  EXPECT_EQ(five_halves.high, 0x8000000000000000u);
  const Turn128 minus_quarter = turn_from_radians(-constants::two_pi / 4.0);
  EXPECT_EQ(minus_quarter.high, 0xc000000000000000u);
  EXPECT_EQ(minus_quarter.low, 0u);
  EXPECT_EQ(turn_from_radians(0.0).high, 0u);
}

TEST(DoubleDouble, SmallAnglesKeepTheirBits) {
  const Turn128 tiny = turn_from_radians(constants::two_pi * 0x1p-70);
  EXPECT_EQ(tiny.high, 0u);
  EXPECT_EQ(tiny.low, uint64_t{1} << 58);
  EXPECT_EQ(turn_from_radians(constants::two_pi * 0x1p-200).low, 0u);
}

}  // namespace
}  // namespace posembed::core
