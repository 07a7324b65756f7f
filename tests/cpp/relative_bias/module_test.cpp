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
