// Tests RelativePositionBias as C++ programs use it.
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <sstream>

#include "posembed/relative_bias.h"

namespace {

using posembed::RelativeBiasOptions;
using posembed::RelativeBuckets;
using posembed::RelativePositionBias;

TEST(RelativeBiasModule, GradientsCountTheScoresOfABucket) {
  RelativePositionBias bias(RelativeBiasOptions(1).num_buckets(5).buckets(RelativeBuckets::bert));
  bias->forward(3).sum().backward();
  const torch::Tensor expected = torch::tensor({{1.f}, {2.f}, {3.f}, {2.f}, {1.f}});
  EXPECT_TRUE(torch::equal(bias->weight.grad(), expected));
}

TEST(RelativeBiasModule, OfPositionsHidesKeysOfOtherDocuments) {
  RelativePositionBias bias(2);
  const posembed::ALiBiCall packed = posembed::ALiBiCall().cu_seqlens(torch::tensor({0, 2, 5}));
  const torch::Tensor found = bias->of_positions(5, std::nullopt, packed);
  EXPECT_TRUE(torch::equal(found.slice(1, 2).slice(2, 2), bias->forward(3)));
  EXPECT_EQ(found.isinf().sum().item<int64_t>(), 2 * 12);
}

TEST(RelativeBiasModule, OfAWindowOfThreeAxes) {
  RelativePositionBias bias(RelativeBiasOptions(2).window({2, 3, 2}));
  EXPECT_EQ(bias->weight.sizes(), (std::vector<int64_t>{45, 2}));
  EXPECT_EQ(bias->of_window().sizes(), (std::vector<int64_t>{2, 12, 12}));
  EXPECT_THROW(bias->table({3, 3, 2}), c10::ValueError);
}

TEST(RelativeBiasModule, PrintsItsOptionsAndRefusesOthers) {
  std::ostringstream text;
  text << RelativePositionBias(RelativeBiasOptions(8).bidirectional(false));
  EXPECT_EQ(text.str(), "RelativePositionBias(8, num_buckets=32, max_distance=128, bidirectional=False)");
  EXPECT_THROW(RelativePositionBias(RelativeBiasOptions(8).num_buckets(5)), c10::ValueError);
  EXPECT_THROW(RelativePositionBias(RelativeBiasOptions(8).max_distance(8)), c10::ValueError);
  EXPECT_THROW(RelativePositionBias(RelativeBiasOptions(8).num_buckets(4).buckets(RelativeBuckets::bert)),
               c10::ValueError);
  EXPECT_THROW(RelativePositionBias(8)->forward(-1), c10::ValueError);
}

}  // namespace
