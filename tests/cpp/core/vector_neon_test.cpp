// Tests that NEON gives the bits of portable vectors, primitive by primitive. On other processors
// there is nothing to test: kernel tests compare their instruction sets.
#if defined(__aarch64__)

#define POSEMBED_ISA portable
#include "core/vector_portable.h"
#undef POSEMBED_ISA
#define POSEMBED_ISA neon
#include "core/vector_neon.h"
#undef POSEMBED_ISA

#include <gtest/gtest.h>

#include <cstring>
#include <random>

namespace posembed::core {
namespace {

using Floats = portable::Floats;
using Words = portable::Words;

template <typename To, typename From>
To bits_of(From value) {
  To result;
  memcpy(&result, &value, sizeof result);
  return result;
}

/// Words in which rounding is hard: halves with exponents around binary16's denormals and overflow,
/// ties, zeros, infinities, and any bits.
Words hard_words(std::mt19937& random) {
  static constexpr uint32_t special[] = {0u,          0x80000000u, 0x7f800000u, 0xff800000u, 0x33000000u, 0x33000001u,
                                         0x387fc000u, 0x477fefffu, 0x477ff000u, 0x3f808000u, 0x3f818000u, 0x00008000u};
  Words words;
  for (int lane = 0; lane < 4; ++lane) {
    const uint32_t any = random();
    const uint32_t halves = (random() % 64 + 96) << 23 | (any & 0x807fffffu);
    const uint32_t tie = (any & 0xffff0000u) | 0x8000u;
    const uint32_t choices[] = {any, halves, tie, special[any % std::size(special)]};
    words[lane] = choices[random() % 4];
  }
  return words;
}

/// The same without NaN, whose payload is not kept on every path.
Words numbers(std::mt19937& random) {
  Words words = hard_words(random);
  for (int lane = 0; lane < 4; ++lane) {
    if ((words[lane] & 0x7fffffffu) > 0x7f800000u) words[lane] &= 0xff800000u;
  }
  return words;
}

template <typename Vector>
void expect_same(Vector expected, Vector found, const char* what) {
  EXPECT_EQ(memcmp(&expected, &found, sizeof expected), 0) << what;
}

TEST(VectorNeon, HasTheBitsOfPortableVectors) {
  std::mt19937 random(7);
  for (int i = 0; i < 100000 && !HasFailure(); ++i) {
    const Words a = numbers(random), b = numbers(random), c = numbers(random);
    const auto x = bits_of<Floats>(a), y = bits_of<Floats>(b), z = bits_of<Floats>(c);
    Floats fused = portable::fma(x, y, z), found = neon::fma(x, y, z);
    for (int lane = 0; lane < 4; ++lane) {
      EXPECT_TRUE(fused[lane] == found[lane] || (fused[lane] != fused[lane] && found[lane] != found[lane]));
    }
    expect_same(portable::even_elements(x, y), neon::even_elements(x, y), "even_elements");
    expect_same(portable::odd_elements(x, y), neon::odd_elements(x, y), "odd_elements");
    expect_same(portable::lower_neighbours(x, y), neon::lower_neighbours(x, y), "lower");
    expect_same(portable::upper_neighbours(x, y), neon::upper_neighbours(x, y), "upper");
    expect_same(portable::join_first_halves(a, b), neon::join_first_halves(a, b), "first halves");
    expect_same(portable::join_half(x, y), neon::join_half(x, y), "join_half");
    expect_same(portable::round_to_half(x), neon::round_to_half(x), "round_to_half");
    expect_same(portable::join_bfloat16(a, b), neon::join_bfloat16(a, b), "join_bfloat16");
    expect_same(portable::join_upper_halves(a, b), neon::join_upper_halves(a, b), "upper halves");
    expect_same(portable::min_halves(a, b), neon::min_halves(a, b), "min_halves");
    EXPECT_EQ(portable::any_lower_half_is_zero(a), neon::any_lower_half_is_zero(a));
    const float sum = portable::add_lanes(x), added = neon::add_lanes(x);
    EXPECT_TRUE(sum == added || (sum != sum && added != added));
  }
}

TEST(VectorNeon, ReadsAndRoundsEveryHalf) {
  for (uint32_t first = 0; first < 65536; first += 4) {
    Float16 halves[4];
    for (uint32_t lane = 0; lane < 4; ++lane) {
      halves[lane].bits = static_cast<uint16_t>(first + lane);
    }
    const Floats expected = portable::load_half(halves), found = neon::load_half(halves);
    for (int lane = 0; lane < 4; ++lane) {
      const bool is_nan = expected[lane] != expected[lane];
      EXPECT_TRUE(is_nan ? found[lane] != found[lane] : expected[lane] == found[lane]);
    }
  }
}

}  // namespace
}  // namespace posembed::core

#endif
