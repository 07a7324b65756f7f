// Tests SinusoidalPositionalEmbedding as C++ programs use it.
#include <gtest/gtest.h>
#include <torch/types.h>

#include "posembed/sinusoidal.h"

namespace {

using posembed::SinusoidalSpec;

TEST(SinusoidalModule, PermutesBetweenPresets) {
  SinusoidalSpec halves(4);
  halves.preset = "marian";
  const torch::Tensor order = SinusoidalSpec(4).permutation_to(halves);
  EXPECT_TRUE(torch::equal(order, torch::tensor({0, 2, 1, 3}, torch::kLong)));
}

}  // namespace
