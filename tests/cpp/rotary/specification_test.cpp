// Tests RotarySpec in C++: text, sequence lengths, errors.
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cmath>

#include "posembed/rotary.h"

namespace posembed {
namespace {

/// Of two specifications that together have every field: text and options keep them all.
TEST(RotarySpec, TextIsCanonicalAndComplete) {
  RotarySpec series(128), given(8);
  series.base = 500000;
  series.rotary_dim = 120;
  series.rotary_start = 8;
  series.interleaved = series.reverse = true;
  series.scaling = Llama3Scaling{8, 1, 4, 8192};
  series.sections = Sections::of({20, 20, 20}, true);
  series.numerics = Numerics::float32;
  series.score_scale.emplace().factor = 2.0;
  given.custom_frequencies = {1, 0.5, 0.25, 0.125};
  given.custom_attention_factor = 1.5;
  for (const RotarySpec& spec : {series, given}) {
    const std::string text = spec.to_json();
    EXPECT_EQ(RotarySpec::from_json(text), spec);
    EXPECT_EQ(RotarySpec::from_json(text).to_json(), text);
    EXPECT_EQ(RotaryOptions(spec).spec().to_json(), text);
    EXPECT_NE(text, RotarySpec(spec.head_dim).to_json());
  }
  EXPECT_NE(series.to_json().find(R"("scaling":{"factor":8.0,"high_freq_factor":4.0)"), std::string::npos);
}

TEST(RotarySpec, TellsItsWavelengths) {
  EXPECT_DOUBLE_EQ(RotarySpec(8).wavelengths()[0].item<double>(), 2.0 * std::acos(-1.0));
}

TEST(ScoreScale, IsReadAndGrows) {
  const RotarySpec spec = RotarySpec::from_json(R"({"head_dim": 128, "score_scale": {
      "growth": 0.1, "length": 16384, "source": "llama_4_scaling_beta"}})");
  ASSERT_TRUE(spec.score_scale.has_value());
  EXPECT_EQ(spec.score_scale->source, "llama_4_scaling_beta");
  const torch::Tensor scales = spec.score_scale->at(torch::tensor({-1, 16383, 100000}));
  const torch::Tensor expected = torch::tensor({1.0, 1.0, 1.0 + 0.1 * std::log(7.0)}, torch::kDouble);
  EXPECT_TRUE(torch::allclose(scales, expected, 1e-15, 1e-15));
  EXPECT_EQ(RotarySpec::from_json(spec.to_json()), spec);
  EXPECT_NE(spec.explain().find("score scale: 1 + 0.1 log(1 + floor(position / 16384)) (llama_4"), std::string::npos);
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
  const torch::Tensor part = permute_rotary_weight(weight, 3, Pairing::interleaved, {8, 4, std::vector<int64_t>{1}});
  EXPECT_TRUE(torch::equal(part.narrow(0, 0, 16), weight.narrow(0, 0, 16)));
  EXPECT_FALSE(torch::equal(part, weight));
  EXPECT_THROW(permute_rotary_weight(weight, 5, Pairing::interleaved), c10::ValueError);
  EXPECT_THROW(permute_rotary_weight(weight, 3, Pairing::interleaved, {{}, 0, {{3}}}), c10::ValueError);
}

}  // namespace
}  // namespace posembed
