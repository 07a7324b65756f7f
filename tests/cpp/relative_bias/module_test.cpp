// Tests RelativePositionBias as C++ programs use it.
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include "posembed/relative_bias.h"

namespace {

using posembed::RelativeBiasOptions;
using posembed::RelativePositionBias;

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

}  // namespace
