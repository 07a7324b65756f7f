// Tests RotarySpec in C++: text, sequence lengths, errors.
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

TEST(RotarySpec, SectionsDeclareAxesWithoutAPair) {
  EXPECT_EQ(Sections::of({1, 1}).position_axes(), 2);
  EXPECT_EQ(Sections::of({1, 1, 0}).position_axes(), 3);
  EXPECT_EQ(Sections::of({1, 1, 0}).used_axes(), 2);
  RotarySpec spec(4), used(4);
  spec.sections = Sections::of({1, 1, 0});
  used.sections = Sections::of({1, 1});
  EXPECT_EQ(RotarySpec::from_json(spec.to_json()), spec);
  EXPECT_NE(spec, used);
  used.sections->axes = 2;
  EXPECT_EQ(used.to_json().find("axes"), std::string::npos);
  spec.sections->axes = 5;
  EXPECT_THROW(spec.check(), c10::ValueError);
}

TEST(RotarySpec, ResolvesForLengths) {
  RotarySpec spec(64);
  spec.scaling = DynamicNtkScaling{2.0, 100};
  EXPECT_TRUE(spec.is_dynamic());
  EXPECT_EQ(spec.resolve(100), RotarySpec(64));
  const RotarySpec longer = spec.resolve(300);
  EXPECT_FALSE(longer.is_dynamic());
  EXPECT_EQ(longer.base, 10000.0);
  EXPECT_EQ(std::get<NtkScaling>(longer.scaling).factor, 5.0);
  EXPECT_EQ(longer.resolve(1000), longer);
  EXPECT_TRUE(torch::equal(spec.frequencies(300), longer.frequencies()));
}

TEST(RotarySpec, AttentionFactorMultipliesQueries) {
  YarnScaling yarn;
  yarn.factor = 4.0;
  yarn.original_max_positions = 64;
  RotaryEmbedding rope(RotaryOptions(32).scaling(yarn));
  const torch::Tensor query = torch::randn({1, 3, 2, 32}, torch::kDouble);
  const torch::Tensor still =
      rope->forward(query, posembed::RotaryCall(torch::zeros({3}, torch::kLong)));
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

TEST(RotarySpec, SaysInWordsWhatItDoes) {
  RotarySpec spec(128);
  spec.base = 500000.0;
  spec.scaling = Llama3Scaling{8, 1, 4, 8192};
  const std::string text = spec.explain();
  EXPECT_EQ(text.find("head of 128: component i turns together with i + 64; base 500,000"), 0);
  EXPECT_NE(text.find("pairs 29 to 63 stretched by up to 8x"), std::string::npos);
  EXPECT_EQ(spec.diff(spec), "equal");
  EXPECT_NE(spec.diff(RotarySpec(128)).find("base: 500000.0 against 10000.0"), std::string::npos);
  EXPECT_DOUBLE_EQ(RotarySpec(8).wavelengths()[0].item<double>(), 2.0 * std::acos(-1.0));
}

TEST(RotarySpec, DescribesSectionsBySizes) {
  RotarySpec spec(128);
  const auto described = [&](const Sections& sections) {
    spec.sections = sections;
    return spec.describe();
  };
  const std::string head = "128, base=10000, sections=Sections(";
  EXPECT_EQ(described(Sections::of({16, 24, 24})), head + "[16,24,24])");
  EXPECT_EQ(described(Sections::of({24, 20, 20}, true, true)),
            head + "[24,20,20], interleaved=True, restart=True)");
  EXPECT_EQ(described(Sections{{0, 1, 1, 0}}), head + "axis_of_pair=[4 numbers])");
  for (const int64_t outside : {int64_t{-1}, int64_t{1} << 40}) {
    EXPECT_EQ(described(Sections{{0, outside}}), head + "axis_of_pair=[2 numbers])");
  }
}

TEST(ScoreScale, IsReadAndGrows) {
  const RotarySpec spec = RotarySpec::from_json(R"({"head_dim": 128, "score_scale": {
      "growth": 0.1, "length": 16384, "source": "llama_4_scaling_beta"}})");
  ASSERT_TRUE(spec.score_scale.has_value());
  EXPECT_EQ(spec.score_scale->source, "llama_4_scaling_beta");
  const torch::Tensor scales = spec.score_scale->at(torch::tensor({-1, 16383, 100000}));
  const torch::Tensor expected =
      torch::tensor({1.0, 1.0, 1.0 + 0.1 * std::log(7.0)}, torch::kDouble);
  EXPECT_TRUE(torch::allclose(scales, expected, 1e-15, 1e-15));
  EXPECT_EQ(RotarySpec::from_json(spec.to_json()), spec);
  EXPECT_NE(spec.explain().find("score scale: 1 + 0.1 log(1 + floor(position / 16384)) (llama_4"),
            std::string::npos);
  EXPECT_NE(spec.diff(RotarySpec(128)).find("score_scale: "), std::string::npos);
  EXPECT_THROW(spec.score_scale->at(torch::rand({2})), c10::TypeError);
}

TEST(PermuteRotaryWeight, ScoresStay) {
  torch::manual_seed(0);
  const torch::Tensor x = torch::randn({5, 12}, torch::kDouble);
  const torch::Tensor weight = torch::randn({3 * 16, 12}, torch::kDouble);
  const torch::Tensor permuted = permute_rotary_weight(weight, 3, Pairing::interleaved);
  const auto scores = [&x](const torch::Tensor& projection, bool interleaved) {
    RotaryEmbedding rope(RotaryOptions(16).interleaved(interleaved).layout(Layout::thd));
    const torch::Tensor heads = rope->forward(torch::mm(x, projection.t()).view({5, 3, 16}));
    return torch::einsum("qhd,khd->hqk", {heads, heads});
  };
  EXPECT_TRUE(torch::allclose(scores(permuted, true), scores(weight, false), 1e-12, 1e-12));
  EXPECT_TRUE(torch::equal(permute_rotary_weight(permuted, 3, Pairing::half_split), weight));
  const torch::Tensor part =
      permute_rotary_weight(weight, 3, Pairing::interleaved, {8, 4, std::vector<int64_t>{1}});
  EXPECT_TRUE(torch::equal(part.narrow(0, 0, 16), weight.narrow(0, 0, 16)));
  EXPECT_FALSE(torch::equal(part, weight));
  EXPECT_THROW(permute_rotary_weight(weight, 5, Pairing::interleaved), c10::ValueError);
  EXPECT_THROW(permute_rotary_weight(weight, 3, Pairing::interleaved, {{}, 0, {{3}}}),
               c10::ValueError);
}

TEST(RotaryEmbedding, MovesCachedKeys) {
  RotarySpec spec(32);
  spec.scaling = DynamicNtkScaling{2.0, 8};
  RotaryEmbedding whole{RotaryOptions(spec)};
  RotaryEmbedding near = whole->resolve(8);
  RotaryEmbedding far = whole->resolve(64);
  const torch::Tensor key = torch::randn({1, 4, 2, 32}, torch::kDouble);
  const torch::Tensor old_positions = torch::arange(4);
  const torch::Tensor new_positions = torch::arange(4) + 50;
  const torch::Tensor cache = near->forward(key, posembed::RotaryCall(old_positions));
  EXPECT_TRUE(
      near->rerotate_(cache, old_positions, new_positions, spec.resolve(64)).is_same(cache));
  EXPECT_TRUE(torch::allclose(cache, far->forward(key, posembed::RotaryCall(new_positions))));
  EXPECT_THROW(whole->forward(key), c10::ValueError);
}

TEST(RotarySpec, RefusesSwappedArgumentsOfAScaling) {
  RotarySpec spec(64);
  spec.scaling = YarnScaling{8192, 4};
  EXPECT_THROW(spec.check(), c10::ValueError);
  spec.scaling = YarnScaling{4, 8192};
  EXPECT_NO_THROW(spec.check());
}

TEST(RotarySpec, FindsTheLargestErrorOfFloat32Angles) {
  RotarySpec spec(128);
  spec.base = 500000;
  const AngleError worst = spec.float32_error(1 << 17);
  EXPECT_NEAR(worst.radians, 9.3e-3, 5e-5);
  EXPECT_LT(worst.position, 1 << 17);
  EXPECT_EQ(spec.float32_error(1).radians, 0.0);
  EXPECT_NE(spec.explain(std::nullopt, 1 << 17).find("0.0093 rad in 131072 positions"),
            std::string::npos);
  EXPECT_THROW(spec.float32_error(0), c10::ValueError);
}

}  // namespace
}  // namespace posembed
