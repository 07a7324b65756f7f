// Compares sine and cosine of turns with long double, and checks the arithmetic of wrapped phases.
#include "core/turn.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "core/double_double.h"

namespace posembed::core {
namespace {

constexpr long double two_pi = 6.283185307179586476925286766559005768L;

/// Sine and cosine of upper / 2^64 turns, with exact reduction to a quadrant.
void reference(uint64_t upper, long double* sine, long double* cosine) {
  const uint64_t quarter = (upper + (uint64_t{1} << 61)) >> 62;
  const auto rest = static_cast<int64_t>(upper - (quarter << 62));
  const long double angle = two_pi * std::ldexp(static_cast<long double>(rest), -64);
  const long double s = std::sin(angle), c = std::cos(angle);
  const long double sines[] = {s, c, -s, -c};
  *sine = sines[quarter & 3];
  *cosine = sines[(quarter + 1) & 3];
}

TEST(Turn, Float32SincosIsWithinOneAndAHalfTenMillionths) {
  std::mt19937_64 random(1);
  long double worst = 0;
  for (int i = 0; i < 4'000'000; ++i) {
    const uint64_t turn = i < 65536 ? static_cast<uint64_t>(i) << 48 : random();
    float sine, cosine;
    sincos_turn(Turn64{turn}, &sine, &cosine);
    long double s, c;
    reference(turn, &s, &c);
    worst = std::max({worst, std::fabs(sine - s), std::fabs(cosine - c)});
  }
  EXPECT_LE(worst, 1.0e-7L);
  EXPECT_GE(worst, 1.0e-9L) << "the reference itself is suspect";
}

TEST(Turn, Float64SincosIsWithinTenToTheMinusFifteen) {
  std::mt19937_64 random(2);
  long double worst = 0;
  for (int i = 0; i < 2'000'000; ++i) {
    const uint64_t turn = i < 65536 ? static_cast<uint64_t>(i) << 48 : random();
    double sine, cosine;
    sincos_turn(Turn128{turn, random()}, &sine, &cosine);
    long double s, c;
    reference(turn, &s, &c);
    worst = std::max({worst, std::fabs(sine - s), std::fabs(cosine - c)});
  }
  EXPECT_LE(worst, 3.0e-16L);
  EXPECT_GE(worst, 1.0e-18L) << "the reference itself is suspect";
}

TEST(Turn, QuarterTurnsAreExact) {
  const float sines[] = {0, 1, 0, -1};
  for (uint64_t quarter = 0; quarter < 4; ++quarter) {
    float s, c;
    double sine, cosine;
    sincos_turn(quarter << 62, &s, &c);
    sincos_turn(Turn128{quarter << 62, 0}, &sine, &cosine);
    EXPECT_EQ(s, sines[quarter]);
    EXPECT_EQ(c, sines[(quarter + 1) % 4]);
    EXPECT_EQ(sine, sines[quarter]);
    EXPECT_EQ(cosine, sines[(quarter + 1) % 4]);
  }
}

TEST(Turn, PhaseWraps) {
  EXPECT_EQ(phase(3, Turn64{0x6000000000000000u}), 0x2000000000000000u);
  EXPECT_EQ(phase(-1, Turn64{5}), static_cast<uint64_t>(-5));
  const Turn128 turn{0x123456789abcdef0u, 0xfedcba9876543210u};
  const int64_t position = (int64_t{1} << 31) - 1;
  const Turn128 forward = phase(position, turn);
  // (2^31 - 1) t = 2^31 t - t, in shifts.
  const Turn128 shifted{turn.high << 31 | turn.low >> 33, turn.low << 31};
  EXPECT_EQ(forward.low, shifted.low - turn.low);
  EXPECT_EQ(forward.high, shifted.high - turn.high - (shifted.low < turn.low ? 1 : 0));
}

TEST(Turn, NegativePositionsTurnBack) {
  const Turn128 turn{0x123456789abcdef0u, 0xfedcba9876543210u};
  for (const int64_t position : {int64_t{1}, int64_t{77}, int64_t{1} << 40}) {
    const Turn128 forward = phase(position, turn), back = phase(-position, turn);
    EXPECT_EQ(forward.low + back.low, 0u);
    EXPECT_EQ(forward.high + back.high + (forward.low != 0 ? 1 : 0), 0u);
  }
}

/// Distance around the circle, in units of 2^-128.
long double distance(Turn128 a, Turn128 b) {
  const uint64_t low = a.low - b.low;
  const auto high = static_cast<int64_t>(a.high - b.high - (a.low < b.low ? 1 : 0));
  return std::ldexp(static_cast<long double>(high), 64) + static_cast<long double>(low);
}

TEST(Turn, FromRadiansAsInDoubleDouble) {
  // The double-double quotient has 104 bits, so that many places from the angle's first bit agree.
  std::mt19937_64 random(3);
  std::uniform_real_distribution<double> exponent(-60, 20);
  for (int i = 0; i < 200'000; ++i) {
    const double sign = i % 2 == 0 ? 1 : -1;
    const double wide = sign * std::exp2(exponent(random));
    for (const double radians : {wide, static_cast<double>(static_cast<float>(wide))}) {
      const Turn128 found = turn_from_radians(radians);
      const Turn128 expected = turn_from_radians(DoubleDouble(radians));
      const long double allowed = std::ldexp(std::fabs(static_cast<long double>(radians)), 26) + 2;
      ASSERT_LE(std::fabs(distance(found, expected)), allowed) << radians;
    }
  }
}

TEST(Turn, FromRadiansWithWholeTurnsDropped) {
  // x and 2^k x, each taken as an exact number, differ by a factor of 2^k in turns.
  std::mt19937_64 random(4);
  std::uniform_real_distribution<double> mantissa(1, 2);
  for (int i = 0; i < 100'000; ++i) {
    const double radians = mantissa(random);
    const int shift = static_cast<int>(random() % 62);
    const Turn128 small = turn_from_radians(radians);
    const Turn128 large = turn_from_radians(std::ldexp(radians, shift));
    const Turn128 product = phase(int64_t{1} << shift, small);
    ASSERT_LE(std::fabs(distance(large, product)), std::ldexp(2.0L, shift)) << radians;
  }
}

TEST(Turn, FromRadiansAtTheEdges) {
  const auto is_zero = [](Turn128 turn) { return turn.high == 0 && turn.low == 0; };
  EXPECT_TRUE(is_zero(turn_from_radians(0.0)));
  EXPECT_TRUE(is_zero(turn_from_radians(-0.0)));
  EXPECT_TRUE(is_zero(turn_from_radians(5e-324)));
  EXPECT_TRUE(is_zero(turn_from_radians(-2.3e-308)));
  EXPECT_EQ(turn_from_radians(0x1p-126).low, 0u);  // 2^-126 / (2 pi) is 0.6 of the last place
  EXPECT_EQ(turn_from_radians(0x1p-123).low, 5u);
  EXPECT_EQ(turn_from_radians(-0x1p-123).high, ~uint64_t{0});
  EXPECT_TRUE(has_turn(-0x1.fffffffffffffp62));
  for (const double none : {0x1p63, -0x1p63, HUGE_VAL, -HUGE_VAL, std::nan("")}) {
    EXPECT_FALSE(has_turn(none));
  }
}

TEST(Turn, RoundsToSixtyFourBits) {
  EXPECT_EQ(round_to_turn64({7, uint64_t{1} << 63}), 8u);
  EXPECT_EQ(round_to_turn64({7, (uint64_t{1} << 63) - 1}), 7u);
}

}  // namespace
}  // namespace posembed::core
