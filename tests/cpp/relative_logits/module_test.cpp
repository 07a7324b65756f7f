// Tests RelativeLogits as C++ programs use it.
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include "posembed/relative_logits.h"

namespace {

using posembed::ALiBiCall;
using posembed::RelativeBuckets;
using posembed::RelativeLogits;
using posembed::RelativeLogitsOptions;

TEST(RelativeLogitsModule, MultipliesTheRowsOfDistances) {
  RelativeLogits shaw(RelativeLogitsOptions(5, 4).scale(0.5));
  const torch::Tensor query = torch::randn({2, 3, 6, 4});
  const torch::Tensor at = torch::arange(6), rows = (at - at.unsqueeze(1)).clamp(-2, 2) + 2;
  const torch::Tensor expected =
      torch::einsum("bhqd,qkd->bhqk", {query, shaw->weight.index_select(0, rows.flatten()).view({6, 6, 4})}) * 0.5;
  EXPECT_TRUE(torch::allclose(shaw->forward(query), expected, 1e-5, 1e-6));
  shaw->forward(query).sum().backward();
  EXPECT_EQ(shaw->weight.grad().sizes(), shaw->weight.sizes());

  const torch::NoGradGuard no_grad;
  const torch::Tensor scores = torch::ones({2, 3, 6, 6});
  EXPECT_TRUE(torch::allclose(shaw->add_(scores, query), expected + 1, 1e-5, 1e-6));
}

TEST(RelativeLogitsModule, HidesKeysOfOtherDocuments) {
  RelativeLogits band(RelativeLogitsOptions(3, 4).buckets(RelativeBuckets::band).bidirectional(false));
  const torch::Tensor query = torch::randn({1, 1, 4, 4});
  const torch::Tensor logits = band->forward(query, 4, ALiBiCall().cu_seqlens(torch::tensor({0, 1, 4})));
  EXPECT_TRUE(torch::isinf(logits).sum().item<int64_t>() == 6);
  EXPECT_EQ(logits[0][0][1][3].item<float>(), 0);  // outside the band
  EXPECT_THROW(band->forward(query, 4, ALiBiCall().causal(true)), c10::ValueError);
}

}  // namespace
