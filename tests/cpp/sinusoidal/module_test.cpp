// Tests SinusoidalPositionalEmbedding as C++ programs use it: options, gradients, copies, printed
// form, errors.
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>

#include <cmath>

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

TEST(SinusoidalModule, ClonesAndCastsWithoutState) {
  SinusoidalPositionalEmbedding position(SinusoidalOptions(8).preset("ddpm"));
  EXPECT_TRUE(position->parameters().empty());
  EXPECT_TRUE(position->buffers().empty());
  auto copy = std::dynamic_pointer_cast<posembed::SinusoidalPositionalEmbeddingImpl>(position->clone());
  copy->to(torch::kHalf);
  const torch::Tensor x = torch::randn({2, 3, 8});
  EXPECT_TRUE(torch::equal(copy->forward(x), position->forward(x)));
}

TEST(SinusoidalModule, StandsInASequential) {
  SinusoidalPositionalEmbedding position(4);
  const torch::Tensor x = torch::randn({2, 3, 4});
  torch::nn::Sequential model(position);
  EXPECT_TRUE(torch::equal(model->forward(x), position->forward(x)));
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

TEST(SinusoidalModule, BadInputRaisesC10Errors) {
  SinusoidalPositionalEmbedding position(SinusoidalOptions(8));
  const torch::Tensor x = torch::randn({1, 3, 8});
  EXPECT_THROW(position->forward(x[0][0]), c10::ValueError);
  EXPECT_THROW(position->forward(x.to(torch::kInt)), c10::TypeError);
  EXPECT_THROW(position->forward(x, torch::zeros({4})), c10::ValueError);
  EXPECT_THROW(SinusoidalPositionalEmbedding(SinusoidalOptions(0)), c10::ValueError);
  EXPECT_THROW(SinusoidalPositionalEmbedding(SinusoidalOptions(8).preset("bert")), c10::ValueError);
  EXPECT_THROW(SinusoidalPositionalEmbedding(SinusoidalOptions(8).shift(4)), c10::ValueError);
  EXPECT_THROW(SinusoidalSpec::from_json("{\"embedding_dim\":8,\"theta\":1}"), c10::ValueError);
}

TEST(SinusoidalModule, TakesTheSequenceFirst) {
  using posembed::AdditiveLayout, posembed::PositionCall;
  const torch::Tensor x = torch::randn({5, 2, 8}), of_samples = torch::tensor({3, 7});
  SinusoidalPositionalEmbedding usual(8), first(SinusoidalOptions(8).layout(AdditiveLayout::sbd));
  const torch::Tensor places = torch::arange(10).view({2, 5});
  for (const PositionCall& call : {PositionCall(), PositionCall().offset(3), PositionCall().offset(of_samples),
                                   PositionCall(places), PositionCall(torch::arange(5))}) {
    EXPECT_TRUE(torch::equal(first->forward(x, call), usual->forward(x.transpose(0, 1), call).transpose(0, 1)));
  }
  const auto documents = PositionCall().cu_seqlens(torch::tensor({0, 2, 5})).offset(4);
  const torch::Tensor one = x.narrow(1, 0, 1);
  EXPECT_TRUE(
      torch::equal(first->forward(one, documents), usual->forward(one.transpose(0, 1), documents).transpose(0, 1)));
  EXPECT_THROW(first->forward(x, PositionCall(torch::arange(2))), c10::ValueError);
  SinusoidalPositionalEmbedding mae(SinusoidalOptions(8).preset("mae").layout(AdditiveLayout::sbd));
  const torch::Tensor cells = torch::zeros({6, 2, 8});
  EXPECT_TRUE(torch::equal(mae->forward(cells, PositionCall().grid({2, 3}))[0][1], mae->encode_grid({2, 3})[0][0]));
}

}  // namespace
