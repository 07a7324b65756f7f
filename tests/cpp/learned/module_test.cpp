// Tests LearnedPositionalEmbedding as C++ programs use it.
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <array>

#include "posembed/learned.h"

namespace {

using posembed::LearnedOptions;
using posembed::LearnedPositionalEmbedding;
using posembed::PositionCall;

TEST(LearnedFunctions, AreWhatTheModuleDoes) {
  LearnedPositionalEmbedding position(LearnedOptions(6, 4).first_row(2));
  const torch::Tensor x = torch::randn({2, 3, 4}), positions = torch::tensor({5, -1}, torch::kLong);
  namespace F = posembed::functional;
  EXPECT_TRUE(torch::equal(F::learned_add(x, position->weight, PositionCall().offset(1), 2),
                           position->forward(x, PositionCall().offset(1))));
  EXPECT_TRUE(torch::equal(F::learned_encode(position->weight, positions, 2), position->encode(positions)));
  const torch::Tensor longer = F::learned_extend(position->weight, 9, 2, "cubic");
  position->extend(9, "cubic");
  EXPECT_TRUE(torch::equal(longer, position->weight));
}

TEST(LearnedModule, ReadsAGridOfATable) {
  const torch::Tensor table = torch::randn({1, 17, 8});
  auto position = LearnedPositionalEmbedding::from_pretrained(table, {4, 4});
  EXPECT_EQ(position->options.prefix_tokens(), 1);
  EXPECT_EQ(position->weight.data_ptr(), table.data_ptr());
  EXPECT_FALSE(position->weight.requires_grad());
  LearnedPositionalEmbedding plain(17, 8);
  plain->extend({6, 5}, std::array<int64_t, 2>{4, 4});
  EXPECT_EQ(plain->weight.size(0), 31);
  EXPECT_THROW(LearnedPositionalEmbedding::from_pretrained(table, {4, 5}), c10::ValueError);
  EXPECT_THROW(LearnedPositionalEmbedding(LearnedOptions({0, 4}, 8)), c10::ValueError);
  EXPECT_THROW(LearnedPositionalEmbedding(17, 8)->resampled({4, 4}), c10::ValueError);
  EXPECT_THROW(plain->extend(40), c10::ValueError);
}

TEST(LearnedModule, PacksPicturesOfAnySize) {
  LearnedPositionalEmbedding position(LearnedOptions({3, 4}, 8).prefix_tokens(1));
  const torch::Tensor grids = torch::tensor({{1, 3, 4}, {2, 6, 2}}, torch::kInt);
  const torch::Tensor own = position->weight.slice(0, 1), other = position->resampled({6, 2});
  const torch::Tensor frame = other.slice(0, 1);
  const torch::Tensor packed = position->packed(grids);
  EXPECT_TRUE(torch::allclose(packed, torch::cat({own, frame, frame}), 1e-5, 1e-7));
  packed.sum().backward();
  EXPECT_NEAR(position->weight.grad().sum().item<double>(), 36 * 8, 1e-3);
  EXPECT_EQ(position->weight.grad()[0].abs().sum().item<double>(), 0.0);
  const auto merged = posembed::PackedPictures().merge(2).num_tokens(24);
  const torch::Tensor squares = position->packed(grids.slice(0, 1), merged);
  const torch::Tensor order = torch::tensor({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11});  // 2 columns
  EXPECT_TRUE(torch::allclose(squares.slice(0, 0, 12), frame.index_select(0, order), 1e-5, 1e-7));
  EXPECT_THROW(position->packed(grids, merged), c10::ValueError);
  EXPECT_THROW(LearnedPositionalEmbedding(17, 8)->packed(grids), c10::ValueError);
}

TEST(LearnedModule, CountsTokensAmongPadding) {
  const torch::Tensor ids = torch::tensor({{1, 5, 1, 7}}, torch::kInt);
  const torch::Tensor expected = torch::tensor({{-1, 0, -1, 1}}, torch::kLong);
  EXPECT_TRUE(torch::equal(posembed::functional::roberta_positions(ids, 1), expected));
  EXPECT_TRUE(torch::equal(posembed::functional::fairseq_positions(ids, 1), expected));
  EXPECT_TRUE(torch::equal(posembed::functional::opt_positions(ids.ne(1), 1), expected.slice(1, 1)));
}

}  // namespace
