// Tests FourierFeatures as C++ programs use it: gradients, casts, copies, files, errors.
#include <gtest/gtest.h>

#include "posembed/fourier.h"

namespace {

using posembed::FourierFeatures;
using posembed::FourierOptions;

torch::Tensor points() { return torch::rand({4, 2}, torch::kDouble); }

TEST(FourierModule, EqualsTheFormulaWithGradients) {
  const torch::Tensor x = points().requires_grad_(), rates = torch::rand({2, 3}, torch::kDouble);
  FourierFeatures module{FourierOptions(rates).learned(true)};
  module->to(torch::kDouble);
  const torch::Tensor angles = x.detach().matmul(module->frequencies.detach());
  const torch::Tensor found = module->forward(x);
  EXPECT_TRUE(torch::allclose(found, torch::cat({angles.sin(), angles.cos()}, -1), 0, 1e-14));
  found.narrow(-1, 0, 3).sum().backward();
  EXPECT_TRUE(torch::allclose(x.grad(), angles.cos().matmul(module->frequencies.t()), 0, 1e-13));
  EXPECT_TRUE(torch::allclose(module->frequencies.grad(), x.detach().t().matmul(angles.cos()), 0, 1e-13));
  EXPECT_TRUE(torch::allclose(module->phases.grad(), angles.cos().sum(0), 0, 1e-13));
}

TEST(FourierModule, FunctionTakesOptions) {
  const torch::Tensor x = points(), rates = torch::rand({3}, torch::kDouble);
  const torch::Tensor found =
      posembed::functional::fourier_features(x, rates, FourierOptions().unit("turn").waves("cos").order("afw"));
  const torch::Tensor angles = x.unsqueeze(-1) * rates * 6.283185307179586;
  EXPECT_TRUE(torch::allclose(found, angles.cos().flatten(1), 0, 1e-14));
}

}  // namespace
