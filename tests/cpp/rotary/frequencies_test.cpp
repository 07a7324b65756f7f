// Compares the plain series, and angles made from it, with values computed to 80 digits.
#include <gtest/gtest.h>

#include <cmath>

#include "core/turn.h"
#include "rotary/rotary.h"

namespace posembed::rotary {
namespace {

TEST(Frequencies, CarryMoreThanDoublePrecision) {
  const struct {
    double base;
    int64_t dim, pair;
    core::DoubleDouble frequency;
  } cases[] = {
      {1e4, 128, 0, 1.0},
      {1e4, 128, 1, {0x1.bb5fad00ab22cp-1, 0x1.a1cecee7dcb25p-58}},
      {1e4, 128, 63, {0x1.e459c57e28a47p-14, -0x1.0c68548856221p-68}},
      {5e5, 128, 17, {0x1.f5ea7e575c95ep-6, -0x1.c66589add1db5p-60}},
      {1e6, 64, 31, {0x1.9d5ef1f0f0812p-20, 0x1.f048c5c050c91p-75}},
      {1e7, 128, 40, {0x1.61bea2721385fp-15, 0x1.773ca04ce1bebp-69}},
      {1e4, 6, 1, {0x1.7c3d2c4d63ff5p-5, 0x1.6aee7e35356b7p-60}},
  };
  for (const auto& item : cases) {
    const auto frequencies = geometric_frequencies(item.base, item.dim);
    ASSERT_EQ(frequencies.size(), static_cast<size_t>(item.dim / 2));
    const core::DoubleDouble result = frequencies[static_cast<size_t>(item.pair)];
    const double error = (result.high - item.frequency.high) + (result.low - item.frequency.low);
    EXPECT_LE(std::fabs(error), 0x1p-98 * item.frequency.high)
        << item.base << ", pair " << item.pair << " of " << item.dim;
  }
}

TEST(Frequencies, AnglesAreExactAtFarPositions) {
  const struct {
    double base;
    int64_t dim, pair, position;
    long double sine, cosine;
  } cases[] = {
      {1e4, 128, 0, 1, 0.84147098480789650665L, 0.5403023058681397174L},
      {1e4, 128, 1, 4095, 0.66999477075883399583L, -0.74236581761003616566L},
      {5e5, 128, 17, 131071, 0.33525577906068741024L, 0.94212714779185274733L},
      {1e6, 64, 5, 1048576, -0.95263636874646365259L, -0.3041117375925364209L},
      {1e7, 128, 40, 999999, -0.97088634745776551026L, -0.23954060265457925644L},
      {1e4, 128, 2, 2147483647, -0.93341703891702205816L, 0.35879329907256981622L},
      {1e7, 128, 63, 2147483647, -0.20700556844908522949L, 0.97833976441268658564L},
      {5e5, 128, 0, 16777215, -0.94823266776874818665L, -0.31757645973239707973L},
  };
  for (const auto& item : cases) {
    const auto frequencies = geometric_frequencies(item.base, item.dim);
    const core::Turn128 turn = core::turn_from_radians(frequencies[static_cast<size_t>(item.pair)]);
    double sine, cosine;
    core::sincos_turn(core::phase(item.position, turn), &sine, &cosine);
    EXPECT_NEAR(sine, static_cast<double>(item.sine), 3e-16) << item.position;
    EXPECT_NEAR(cosine, static_cast<double>(item.cosine), 3e-16) << item.position;
    float s, c;
    core::sincos_turn(core::phase(item.position, core::round_to_turn64(turn)), &s, &c);
    EXPECT_NEAR(s, static_cast<double>(item.sine), 1.5e-7) << item.position;
    EXPECT_NEAR(c, static_cast<double>(item.cosine), 1.5e-7) << item.position;
  }
}

TEST(Frequencies, NoDimensionsNoFrequencies) { EXPECT_TRUE(geometric_frequencies(1e4, 0).empty()); }

}  // namespace
}  // namespace posembed::rotary
