// Tests SinusoidalPositionalEmbedding as C++ programs use it: options, gradients, copies, printed
// form, errors.
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include "posembed/sinusoidal.h"

namespace {

using posembed::SinusoidalOptions;
using posembed::SinusoidalPositionalEmbedding;
using posembed::SinusoidalSpec;

TEST(SinusoidalModule, GradientsReachInputAndPositions) {
  SinusoidalPositionalEmbedding position(SinusoidalOptions(2));
  const torch::Tensor x = torch::randn({3, 2}, torch::dtype(torch::kFloat64).requires_grad(true));
  const torch::Tensor positions = torch::tensor({0.5, 1.5, 2.5}, torch::dtype(torch::kFloat64).requires_grad(true));
  position->forward(x, positions).select(-1, 0).sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), torch::tensor({{1.0, 0.0}, {1.0, 0.0}, {1.0, 0.0}}, torch::kFloat64)));
  EXPECT_TRUE(torch::allclose(positions.grad(), positions.detach().cos(), 0, 1e-14));
}

TEST(SinusoidalModule, PermutesBetweenPresets) {
  SinusoidalSpec halves(4);
  halves.preset = "marian";
  const torch::Tensor order = SinusoidalSpec(4).permutation_to(halves);
  EXPECT_TRUE(torch::equal(order, torch::tensor({0, 2, 1, 3}, torch::kLong)));
}

TEST(SinusoidalModule, SpecificationIsAValue) {
  SinusoidalSpec spec(512);
  spec.shift = 0.5;
  EXPECT_EQ(SinusoidalSpec::from_json(spec.to_json()), spec);
  EXPECT_NE(SinusoidalSpec(512), spec);
}

}  // namespace
