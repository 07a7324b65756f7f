// Tests FourierFeatures as C++ programs use it.
#include <gtest/gtest.h>

#include "posembed/fourier.h"

namespace {

using posembed::FourierOptions;

TEST(FourierModule, FunctionTakesOptions) {
  const torch::Tensor x = torch::rand({4, 2}, torch::kDouble), rates = torch::rand({3}, torch::kDouble);
  const torch::Tensor found =
      posembed::functional::fourier_features(x, rates, FourierOptions().unit("turn").waves("cos").order("afw"));
  const torch::Tensor angles = x.unsqueeze(-1) * rates * 6.283185307179586;
  EXPECT_TRUE(torch::allclose(found, angles.cos().flatten(1), 0, 1e-14));
}

}  // namespace
