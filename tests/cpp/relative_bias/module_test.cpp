// Tests RelativePositionBias as C++ programs use it.
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <sstream>

#include "posembed/relative_bias.h"

namespace {

using posembed::RelativeBiasOptions;
using posembed::RelativeBuckets;
using posembed::RelativePositionBias;

TEST(RelativeBiasModule, LooksUpTheBucketOfEachDistance) {
  const RelativeBiasOptions options = RelativeBiasOptions(3).num_buckets(8).max_distance(20);
  RelativePositionBias bias(options);
  const torch::Tensor distances = torch::arange(7).unsqueeze(0) - torch::arange(4).unsqueeze(1) - 3;
  const torch::Tensor buckets = posembed::functional::relative_buckets(distances, options);
  const torch::Tensor expected =
      bias->weight.index_select(0, buckets.flatten()).view({4, 7, 3}).permute({2, 0, 1});
  EXPECT_TRUE(torch::equal(bias->forward(4, 7), expected));
  EXPECT_TRUE(torch::equal(bias->forward(4, 7, 3), expected));
  EXPECT_EQ(bias->forward(0, 7).numel(), 0);
  EXPECT_EQ(bias->forward(4, 0).numel(), 0);
}

TEST(RelativeBiasModule, GradientsCountTheScoresOfABucket) {
  RelativePositionBias bias(RelativeBiasOptions(1).num_buckets(5).buckets(RelativeBuckets::bert));
  bias->forward(3).sum().backward();
  const torch::Tensor expected = torch::tensor({{1.f}, {2.f}, {3.f}, {2.f}, {1.f}});
  EXPECT_TRUE(torch::equal(bias->weight.grad(), expected));
}

TEST(RelativeBiasModule, LooksUpTheDifferencesOfAWindow) {
  RelativePositionBias bias(RelativeBiasOptions(3).window({2, 3}).class_token(true));
  const torch::Tensor found = bias->of_window();
  ASSERT_EQ(found.sizes(), (std::vector<int64_t>{3, 7, 7}));
  const auto row = [&](int64_t query, int64_t key) -> int64_t {
    if (query == 0 || key == 0) return query == key ? 17 : query == 0 ? 15 : 16;
    const int64_t y = (query - 1) / 3 - (key - 1) / 3, x = (query - 1) % 3 - (key - 1) % 3;
    return (y + 1) * 5 + x + 2;
  };
  for (int64_t query = 0; query < 7; ++query) {
    for (int64_t key = 0; key < 7; ++key) {
      EXPECT_TRUE(
          torch::equal(found.select(1, query).select(1, key), bias->weight[row(query, key)]));
    }
  }
  const torch::Tensor other = bias->of_window({4, 2});
  bias->extend({4, 2});
  EXPECT_TRUE(torch::equal(bias->of_window(), other));
  EXPECT_THROW(bias->forward(7), c10::ValueError);
}

TEST(RelativeBiasModule, ComputesATableFromDistances) {
  RelativePositionBias bias(RelativeBiasOptions(3).window({2, 3}).mlp_dim(8));
  EXPECT_EQ(bias->parameters().size(), 3);
  EXPECT_EQ(bias->named_parameters().keys()[0], "mlp.0.weight");
  const torch::Tensor found = bias->of_window({3, 3});
  EXPECT_TRUE(((found > 0) & (found < 16)).all().item<bool>());
  found.sum().backward();
  EXPECT_TRUE(bias->parameters()[0].grad().defined());
  std::ostringstream text;
  text << bias;
  EXPECT_EQ(text.str().rfind("RelativePositionBias(3, window=(2, 3), mlp_dim=8)", 0), 0);
  EXPECT_THROW(RelativePositionBias(RelativeBiasOptions(3).mlp_dim(8)), c10::ValueError);
}

TEST(RelativeBiasModule, PrintsItsOptionsAndRefusesOthers) {
  std::ostringstream text;
  text << RelativePositionBias(RelativeBiasOptions(8).bidirectional(false));
  EXPECT_EQ(text.str(),
            "RelativePositionBias(8, num_buckets=32, max_distance=128, bidirectional=False)");
  EXPECT_THROW(RelativePositionBias(RelativeBiasOptions(8).num_buckets(5)), c10::ValueError);
  EXPECT_THROW(RelativePositionBias(RelativeBiasOptions(8).max_distance(8)), c10::ValueError);
  EXPECT_THROW(
      RelativePositionBias(RelativeBiasOptions(8).num_buckets(4).buckets(RelativeBuckets::bert)),
      c10::ValueError);
  EXPECT_THROW(RelativePositionBias(8)->forward(-1), c10::ValueError);
}

}  // namespace
