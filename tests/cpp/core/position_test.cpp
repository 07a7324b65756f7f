// Compares the angles of fractional positions with 113-bit arithmetic.
#include "core/position.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "core/double_double.h"

namespace posembed::core {
namespace {

// On Arm, long double has 113 bits.
#if defined(__aarch64__)
using Wide = long double;
#else
__extension__ using Wide = __float128;
#endif

/// position * radians in turns, less the nearest whole number.
double turns(double position, double radians) {
  const Wide two_pi = Wide(constants::two_pi.high) + Wide(constants::two_pi.low);
  const Wide angle = Wide(position) * Wide(radians) / two_pi;
  return static_cast<double>(angle - Wide(std::llround(static_cast<double>(angle))));
}

/// The difference from `expected` in turns, whole turns dropped.
double error(uint64_t turn, double expected) {
  const auto target = static_cast<int64_t>(std::llround(std::ldexp(expected, 62)));
  const auto found = static_cast<int64_t>(turn);
  return std::ldexp(
      static_cast<double>(static_cast<int64_t>(static_cast<uint64_t>(found) - (static_cast<uint64_t>(target) << 2))),
      -64);
}

TEST(Position, AnglesAreAsExactAsThoseOfWholeNumbers) {
  std::mt19937_64 random(3);
  std::uniform_real_distribution<double> exponent(-20, 20), unit(-1, 1);
  double worst = 0, worst_wide = 0;
  for (int i = 0; i < 200'000; ++i) {
    const double position = std::ldexp(unit(random), int(exponent(random)));
    const double radians = std::ldexp(unit(random), int(exponent(random)) / 4);
    const Turn128 wide = turn_from_radians(radians);
    const Turn64 narrow = round_to_turn64(wide);
    const double expected = turns(position, radians);
    const Position parts = split(position);
    const Turn64 phase64 = phase(parts, narrow, whole_turns(radians, narrow));
    const Turn128 phase128 = phase(parts, wide, whole_turns(radians, wide));
    worst = std::max(worst, std::fabs(error(phase64, expected)));
    worst_wide = std::max(worst_wide, std::fabs(error(phase128.high, expected)));
  }
  EXPECT_LE(worst, 0x1p-43) << "2^20 positions times a turn's rounding by 2^-65";
  EXPECT_LE(worst_wide, 0x1p-54) << "the reference is rounded to double";
}

TEST(Position, SplitsIntoAWholeNumberAndAPart) {
  EXPECT_EQ(split(-0.25).whole, -1);
  EXPECT_EQ(split(-0.25).part, uint64_t{3} << 62);
  EXPECT_EQ(split(-0x1p-80).whole, 0);
  EXPECT_EQ(split(-0x1p-80).part, 0u);
  EXPECT_EQ(to_double(split(-2.75)), -2.75);
  EXPECT_EQ(to_double(split(0x1p62)), 0x1p62);
  for (const double bad : {double{INFINITY}, double{NAN}, 0x1p63, -0x1p64}) {
    EXPECT_TRUE(std::isnan(split(bad).scale)) << bad;
    EXPECT_TRUE(std::isnan(to_double(split(bad)))) << bad;
  }
}

TEST(Position, WholeTurnsFitTheTurn) {
  for (const double radians : {0.0, 1.0, 6.25, 6.5, -0.1, -6.5, 100.0, 1e-30, -1e-30, -1e12}) {
    const Turn128 wide = turn_from_radians(radians);
    const Turn64 narrow = round_to_turn64(wide);
    const double turns = radians * 0.15915494309189535;
    const auto sum = [](int64_t whole, Turn64 turn) {
      return static_cast<double>(whole) + std::ldexp(static_cast<double>(turn), -64);
    };
    const double allowed = 1e-15 * std::fabs(turns) + 0x1p-53;
    EXPECT_NEAR(sum(whole_turns(radians, narrow), narrow), turns, allowed) << radians;
    EXPECT_NEAR(sum(whole_turns(radians, wide), wide.high), turns, allowed) << radians;
  }
}

}  // namespace
}  // namespace posembed::core
