// Sine and cosine of turns against long double, and the arithmetic of wrapped phases.
#include "core/turn.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

namespace posembed::core {
namespace {

constexpr long double two_pi = 6.283185307179586476925286766559005768L;

/// Sine and cosine of upper / 2^64 turns, with the quadrant taken off exactly.
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

TEST(Turn, RoundsToSixtyFourBits) {
  EXPECT_EQ(round_to_turn64({7, uint64_t{1} << 63}), 8u);
  EXPECT_EQ(round_to_turn64({7, (uint64_t{1} << 63) - 1}), 7u);
}

}  // namespace
}  // namespace posembed::core
