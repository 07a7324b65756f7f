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
