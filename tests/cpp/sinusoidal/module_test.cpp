// Tests SinusoidalPositionalEmbedding as C++ programs use it: options, gradients, copies, printed
// form, errors.
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <cmath>
#include <sstream>

#include "posembed/sinusoidal.h"

namespace {

using posembed::PositionCall;
using posembed::SinusoidalOptions;
using posembed::SinusoidalPositionalEmbedding;
using posembed::SinusoidalSpec;

TEST(SinusoidalModule, AddsSinesAndCosines) {
  SinusoidalPositionalEmbedding position(SinusoidalOptions(4).base(100.0).scale(2.0));
  const torch::Tensor y =
      position->forward(torch::ones({1, 3, 4}, torch::kFloat64), PositionCall().offset(5));
  for (int64_t i = 0; i < 3; ++i) {
    const double p = 5.0 + static_cast<double>(i);
    const double expected[] = {std::sin(p), std::cos(p), std::sin(p / 10), std::cos(p / 10)};
    for (int64_t c = 0; c < 4; ++c) {
      EXPECT_NEAR(y[0][i][c].item<double>(), 1 + 2 * expected[c], 4e-15);
    }
  }
}

TEST(SinusoidalModule, GradientsReachInputAndPositions) {
  SinusoidalPositionalEmbedding position(SinusoidalOptions(2));
  const torch::Tensor x = torch::randn({3, 2}, torch::dtype(torch::kFloat64).requires_grad(true));
  const torch::Tensor positions =
      torch::tensor({0.5, 1.5, 2.5}, torch::dtype(torch::kFloat64).requires_grad(true));
  position->forward(x, positions).select(-1, 0).sum().backward();
  EXPECT_TRUE(
      torch::equal(x.grad(), torch::tensor({{1.0, 0.0}, {1.0, 0.0}, {1.0, 0.0}}, torch::kFloat64)));
  EXPECT_TRUE(torch::allclose(positions.grad(), positions.detach().cos(), 0, 1e-14));
}

TEST(SinusoidalModule, ShiftMatrixMovesEncodings) {
  for (const char* preset : {"vaswani", "marian", "tensor2tensor"}) {
    for (const bool cos_first : {false, true}) {
      SinusoidalPositionalEmbedding position(
          SinusoidalOptions(8).preset(preset).cos_first(cos_first));
      const torch::Tensor positions = torch::tensor({3.0, 100.25}, torch::kFloat64);
      const torch::Tensor moved =
          position->encode(positions).matmul(position->shift_matrix(-7.5).transpose(0, 1));
      EXPECT_TRUE(torch::allclose(moved, position->encode(positions - 7.5), 0, 1e-14));
    }
  }
}

TEST(SinusoidalModule, ClonesAndCastsWithoutState) {
  SinusoidalPositionalEmbedding position(SinusoidalOptions(8).preset("ddpm"));
  EXPECT_TRUE(position->parameters().empty());
  EXPECT_TRUE(position->buffers().empty());
  auto copy =
      std::dynamic_pointer_cast<posembed::SinusoidalPositionalEmbeddingImpl>(position->clone());
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

TEST(SinusoidalModule, LearnsItsScale) {
  SinusoidalPositionalEmbedding position(SinusoidalOptions(2).scale(0.5).learned_scale(true));
  ASSERT_EQ(position->parameters().size(), 1);
  const torch::Tensor y = position->forward(torch::zeros({1, 3, 2}));
  y.select(-1, 1).sum().backward();
  const torch::Tensor cosines = torch::arange(3, torch::kFloat).cos();
  EXPECT_TRUE(torch::allclose(y[0].select(-1, 1), 0.5 * cosines, 0, 1e-7));
  EXPECT_TRUE(torch::allclose(position->scale.grad(), cosines.sum(), 0, 1e-6));
}

TEST(SinusoidalModule, PermutesBetweenPresets) {
  SinusoidalSpec halves(4);
  halves.preset = "marian";
  const torch::Tensor order = SinusoidalSpec(4).permutation_to(halves);
  EXPECT_TRUE(torch::equal(order, torch::tensor({0, 2, 1, 3}, torch::kLong)));
}

TEST(SinusoidalModule, FairseqsPaddingIsZero) {
  SinusoidalPositionalEmbedding fairseq(SinusoidalOptions(8).preset("fairseq").padding_idx(3));
  SinusoidalPositionalEmbedding plain(SinusoidalOptions(8).preset("tensor2tensor"));
  const torch::Tensor positions = torch::tensor({-1, 0, 1, 100}, torch::kLong);
  const torch::Tensor found = fairseq->encode(positions);
  EXPECT_FALSE(found[0].any().item<bool>());
  EXPECT_TRUE(torch::equal(found.slice(0, 1), plain->encode(positions.slice(0, 1) + 4)));
  const torch::Tensor x = torch::randn({2, 3, 8});
  EXPECT_TRUE(torch::equal(SinusoidalPositionalEmbedding(SinusoidalOptions(8).preset("fairseq"))
                               ->forward(x, PositionCall().offset(5)),
                           plain->forward(x, PositionCall().offset(7))));
  std::ostringstream text;
  text << fairseq;
  EXPECT_EQ(text.str(),
            "SinusoidalPositionalEmbedding(8, base=10000, preset='fairseq', padding_idx=3)");
  EXPECT_THROW(SinusoidalPositionalEmbedding(SinusoidalOptions(8).padding_idx(-1)),
               c10::ValueError);
}

TEST(SinusoidalModule, PrintsItsOptions) {
  std::ostringstream text;
  text << SinusoidalPositionalEmbedding(SinusoidalOptions(512).preset("ddpm").cos_first(true));
  EXPECT_EQ(text.str(),
            "SinusoidalPositionalEmbedding(512, base=10000, preset='ddpm', cos_first=True)");
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

TEST(SinusoidalModule, EncodesTheCellsOfAPicture) {
  SinusoidalPositionalEmbedding position(SinusoidalOptions(8).preset("mae").scale(0.5));
  SinusoidalPositionalEmbedding axis(SinusoidalOptions(4).preset("marian").scale(0.5));
  const torch::Tensor x = torch::randn({2, 6, 8}, torch::kFloat64);
  const torch::Tensor y = position->forward(x, PositionCall().grid({2, 3}));
  const torch::Tensor codes = position->encode_grid({2, 3}, std::nullopt, torch::kFloat64);
  EXPECT_TRUE(torch::equal(y, x + codes));
  const auto at = torch::dtype(torch::kFloat64);
  const torch::Tensor columns = axis->encode(torch::tensor({0, 1, 2, 0, 1, 2}, at)),
                      rows = axis->encode(torch::tensor({0, 0, 0, 1, 1, 1}, at));
  EXPECT_TRUE(torch::equal(codes[0], torch::cat({columns, rows}, 1)));
  EXPECT_EQ(position->options.spec().num_axes(), 2);
  EXPECT_THROW(position->forward(x), c10::ValueError);
  EXPECT_THROW(position->forward(x, PositionCall().grid({2, 2})), c10::ValueError);
  EXPECT_THROW(axis->forward(x.narrow(-1, 0, 4), PositionCall().grid({2, 3})), c10::ValueError);
}

TEST(SinusoidalModule, CountsTheCellsOfAMask) {
  SinusoidalPositionalEmbedding position(SinusoidalOptions(8).preset("detr").length(0));
  const torch::Tensor mask = torch::tensor({{{true, true, false}, {true, true, false}}});
  const torch::Tensor found =
      posembed::functional::sinusoidal_grid_positions(position->options.spec(), {2, 3}, mask);
  const torch::Tensor expected =
      torch::tensor({{{1, 1, 0, 2, 2, 0}}, {{1, 2, 2, 1, 2, 2}}}, torch::kFloat64);
  EXPECT_TRUE(torch::equal(found, expected));
  std::ostringstream text;
  text << position;
  EXPECT_EQ(text.str(), "SinusoidalPositionalEmbedding(8, base=10000, preset='detr', length=0)");
}

}  // namespace
