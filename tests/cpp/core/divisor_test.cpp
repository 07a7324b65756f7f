// Compares division by multiplication with the processor's division.
#include "core/divisor.h"

#include <gtest/gtest.h>

#include <random>

namespace posembed::core {
namespace {

template <typename Word>
void check(Word number, Word divisor) {
  const Quotient<Word> found = divide(number, Divisor<Word>::of(divisor));
  ASSERT_EQ(found.quotient, number / divisor) << number << " / " << divisor;
  ASSERT_EQ(found.remainder, number % divisor) << number << " / " << divisor;
}

template <typename Word>
class DivisorOf : public testing::Test {};
using Words = testing::Types<int, int64_t>;
TYPED_TEST_SUITE(DivisorOf, Words);

TYPED_TEST(DivisorOf, EverySmallNumber) {
  for (TypeParam divisor = 1; divisor < 600; ++divisor) {
    for (TypeParam number = 0; number < 3000; ++number) {
      ASSERT_NO_FATAL_FAILURE(check(number, divisor));
    }
  }
}

TYPED_TEST(DivisorOf, NumbersBesideMultiples) {
  constexpr TypeParam largest = std::numeric_limits<TypeParam>::max();
  std::mt19937_64 random(1);
  for (int i = 0; i < 200'000; ++i) {
    const auto divisor = static_cast<TypeParam>(random() >> 1 >> random() % 64 & largest) | 1;
    const TypeParam multiple = static_cast<TypeParam>(random() & largest) / divisor * divisor;
    for (const TypeParam number : {multiple, multiple > 0 ? multiple - 1 : 0, largest}) {
      ASSERT_NO_FATAL_FAILURE(check(number, divisor));
      ASSERT_NO_FATAL_FAILURE(check(number, divisor == largest ? divisor : static_cast<TypeParam>(divisor + 1)));
    }
  }
}

}  // namespace
}  // namespace posembed::core
