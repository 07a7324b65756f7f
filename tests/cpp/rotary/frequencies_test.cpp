// Compares the plain series with values computed to 80 digits.
#include <gtest/gtest.h>

#include <cmath>

#include "core/double_double.h"
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

TEST(Frequencies, NoDimensionsNoFrequencies) { EXPECT_TRUE(geometric_frequencies(1e4, 0).empty()); }

}  // namespace
}  // namespace posembed::rotary
