// Tests positions as C++ programs use them. tests/python/positions compares them with transformers.
#include <gtest/gtest.h>
#include <torch/types.h>

#include "posembed/positions.h"
#include "posembed/rotary.h"

namespace {

using posembed::GridOptions;
using posembed::MropeCall;
using posembed::MropeRule;
namespace positions = posembed::positions;

torch::Tensor whole(std::vector<int64_t> numbers) { return torch::tensor(std::move(numbers)); }

/// Two tokens of text, an image of 2 x 3 merged patches, and two tokens of text.
torch::Tensor prompt() {
  const torch::Tensor image = torch::full({6}, 151655, torch::kLong);
  return torch::cat({whole({1, 2}), image, whole({3, 4})}).unsqueeze(0);
}

TEST(Positions, TextGoesOnAfterAnImage) {
  const MropeCall call = MropeCall().image_grids(whole({1, 4, 6}).view({1, 3}));
  const auto [found, delta] = positions::mrope(prompt(), MropeRule::named("qwen2_vl"), call);
  const torch::Tensor expected =
      whole({0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 0, 1, 2, 3, 4, 2, 3, 4, 5, 6});
  EXPECT_TRUE(torch::equal(found, expected.view({3, 1, 10})));
  EXPECT_TRUE(torch::equal(delta, whole({-3}).view({1, 1})));
}

TEST(Positions, RulesAreReadAndWritten) {
  for (const std::string& name : MropeRule::names()) {
    const MropeRule rule = MropeRule::named(name);
    EXPECT_EQ(MropeRule::from_json(rule.to_json()), rule) << name;
  }
  const MropeRule rule =
      MropeRule::from_json(R"({"video_token": 9, "spatial_merge": 3, "time": "interval", "positions_per_second": 4})");
  EXPECT_EQ(rule.video_token, 9);
  EXPECT_EQ(rule.spatial_merge, 3);
  EXPECT_EQ(rule.positions_per_second, 4);
  EXPECT_THROW(MropeRule::named("llama"), c10::ValueError);
  EXPECT_THROW(MropeRule::from_json(R"({"spatial_merge": 0})"), c10::ValueError);
}

TEST(Positions, GridsGoByRowsOrBySquares) {
  const torch::Tensor plain = positions::grid(GridOptions(2, 1, 2).order("tw"));
  EXPECT_TRUE(torch::equal(plain, whole({0, 0, 1, 1, 0, 1, 0, 1}).view({2, 4})));
  const torch::Tensor squares = positions::grid(GridOptions(1, 2, 4).order("wh").merge(2));
  EXPECT_TRUE(torch::equal(squares, whole({0, 1, 0, 1, 2, 3, 2, 3, 0, 0, 1, 1, 0, 0, 1, 1}).view({2, 8})));
  const torch::Tensor centred = positions::grid(GridOptions(1, 1, 4).centred(true).order("w"));
  EXPECT_TRUE(torch::equal(centred, torch::tensor({{-1.5f, -0.5f, 0.5f, 1.5f}})));
  EXPECT_THROW(positions::grid(GridOptions(1, 2, 2).order("hh")), c10::ValueError);
}

TEST(Positions, PicturesArePacked) {
  const torch::Tensor grids = whole({1, 2, 4, 2, 2, 2}).view({2, 3});
  const auto options = posembed::PackedGridOptions().merge(2).order("wh").num_tokens(16);
  const torch::Tensor expected = torch::cat({positions::grid(GridOptions(1, 2, 4).merge(2).order("wh")),
                                             positions::grid(GridOptions(2, 2, 2).merge(2).order("wh"))},
                                            1);
  EXPECT_TRUE(torch::equal(positions::packed_grids(grids, options), expected));
  EXPECT_THROW(positions::packed_grids(grids, posembed::PackedGridOptions().merge(3)), c10::ValueError);
}

TEST(Positions, DocumentsRestartAndSplit) {
  const torch::Tensor boundaries = whole({0, 4, 12}).to(torch::kInt);
  EXPECT_TRUE(torch::equal(positions::packed(boundaries, 12), torch::cat({torch::arange(4), torch::arange(8)})));
  EXPECT_TRUE(torch::equal(positions::packed(boundaries, 12, whole({7, 2})),
                           torch::cat({torch::arange(7, 11), torch::arange(2, 10)})));
  EXPECT_THROW(positions::packed(boundaries, 12, whole({7})), c10::ValueError);
  EXPECT_TRUE(torch::equal(positions::packed_documents(whole({5, 5, 3, -1})), whole({0, 1, 0, -1})));
  EXPECT_TRUE(torch::equal(positions::from_mask(whole({0, 1, 1})), whole({-1, 0, 1})));
  const auto part = positions::zigzag(boundaries, 1, 2);
  EXPECT_TRUE(torch::equal(part.positions, whole({1, 2, 2, 3, 4, 5})));
  EXPECT_TRUE(torch::equal(part.indices, whole({1, 2, 6, 7, 8, 9})));
  EXPECT_TRUE(torch::equal(part.cu_seqlens, whole({0, 2, 6}).to(torch::kInt)));
  EXPECT_THROW(positions::zigzag(boundaries, 2, 2), c10::ValueError);
  EXPECT_THROW(positions::zigzag(boundaries, 0, 3), c10::ValueError);
}

}  // namespace
