// RotarySpec in C++: text, lengths of sequences, refusals.
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cmath>

#include "posembed/rotary.h"

namespace posembed {
namespace {

TEST(RotarySpec, TextIsCanonicalAndComplete) {
  RotarySpec spec(128);
  spec.base = 500000;
  spec.scaling = Llama3Scaling{8, 1, 4, 8192};
  spec.sections = Sections::of({24, 20, 20}, true);
  const std::string text = spec.to_json();
  EXPECT_NE(text.find(R"("scaling":{"factor":8.0,"high_freq_factor":4.0)"), std::string::npos);
  EXPECT_EQ(RotarySpec::from_json(text), spec);
  EXPECT_EQ(RotarySpec::from_json(text).to_json(), text);
  EXPECT_EQ(RotaryOptions(spec).spec(), spec);
}

TEST(RotarySpec, SectionsOneAfterTheOtherOrInTurns) {
  EXPECT_EQ(Sections::of({1, 2, 1}).axis_of_pair, (std::vector<int64_t>{0, 1, 1, 2}));
  EXPECT_EQ(Sections::of({3, 1, 1}, true).axis_of_pair, (std::vector<int64_t>{0, 1, 2, 0, 0}));
}

TEST(RotarySpec, ResolvesForLengths) {
  RotarySpec spec(64);
  spec.scaling = DynamicNtkScaling{2.0, 100};
  EXPECT_TRUE(spec.is_dynamic());
  EXPECT_EQ(spec.resolve(100), RotarySpec(64));
  const RotarySpec longer = spec.resolve(300);
  EXPECT_FALSE(longer.is_dynamic());
  EXPECT_NEAR(longer.base, 10000.0 * std::pow(5.0, 64.0 / 62.0), 1e-8);
  EXPECT_EQ(longer.resolve(1000), longer);
  EXPECT_TRUE(torch::equal(spec.frequencies(300), longer.frequencies()));
}

TEST(RotarySpec, AttentionFactorMultipliesQueries) {
  YarnScaling yarn;
  yarn.factor = 4.0;
  yarn.original_max_positions = 64;
  RotaryEmbedding rope(RotaryOptions(32).scaling(yarn));
  const torch::Tensor query = torch::randn({1, 3, 2, 32}, torch::kDouble);
  const torch::Tensor still = rope->forward(query, std::nullopt, torch::zeros({3}, torch::kLong));
  EXPECT_TRUE(torch::allclose(still, query * (0.1 * std::log(4.0) + 1.0)));
}

TEST(RotarySpec, RefusesWhatDoesNotFit) {
  RotarySpec spec(8);
  spec.scaling = LinearScaling{0.0};
  EXPECT_THROW(spec.check(), c10::ValueError);
  spec.scaling = {};
  spec.sections = Sections::of({1, 1});
  EXPECT_THROW(spec.check(), c10::ValueError);
  spec.sections = {};
  spec.custom_frequencies = {1.0, 2.0, 3.0, NAN};
  EXPECT_THROW(spec.check(), c10::ValueError);
}

}  // namespace
}  // namespace posembed
