// Tests InputEmbedding as C++ programs use it.
#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/nn/functional/normalization.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>

#include <cmath>
#include <sstream>

#include "posembed/input.h"

namespace {

using posembed::InputCall;
using posembed::InputEmbedding;
using posembed::InputEmbeddingImpl;
using posembed::InputNorm;
using posembed::InputOptions;
using posembed::Positions;

InputOptions bert() {
  return InputOptions(11, 8)
      .max_positions(6)
      .num_types(2)
      .norm(InputNorm::layer)
      .eps(1e-12)
      .padding_idx(0);
}

torch::Tensor some_ids() { return torch::tensor({{1, 2, 0, 9}, {4, 4, 10, 0}}, torch::kLong); }

TEST(InputFunction, EqualsTheModule) {
  InputEmbedding embed(bert());
  const torch::Tensor types = torch::tensor({{0, 0, 1, 1}, {1, 0, 1, 0}}, torch::kInt);
  posembed::InputParts parts;
  parts.position(embed->learned->weight)
      .token_type(embed->token_type->weight)
      .types(types)
      .norm(InputNorm::layer)
      .norm_weight(embed->norm->weight)
      .norm_bias(embed->norm->bias)
      .eps(1e-12)
      .padding_idx(0)
      .offset(1);
  const torch::Tensor& table = embed->token->weight;
  const torch::Tensor expected = embed->forward(some_ids(), InputCall().types(types).offset(1));
  const torch::Tensor result = posembed::functional::input_embedding(some_ids(), table, parts);
  EXPECT_TRUE(torch::equal(result, expected));
  const torch::Tensor gradient = torch::randn_like(result);
  EXPECT_TRUE(torch::equal(torch::autograd::grad({result}, {table}, {gradient})[0],
                           torch::autograd::grad({expected}, {table}, {gradient})[0]));
  parts.dropout(0.5).seed(torch::tensor({7}, torch::kLong));
  const torch::Tensor dropped = posembed::functional::input_embedding(some_ids(), table, parts);
  EXPECT_TRUE(torch::equal(torch::where(dropped == 0, dropped, 2 * expected), dropped));
  EXPECT_TRUE((dropped == 0).any().item<bool>());
}

TEST(InputModule, NamesItsParameters) {
  InputEmbedding embed(bert());
  const std::vector<std::string> expected = {"token.weight", "position.weight", "token_type.weight",
                                             "norm.weight", "norm.bias"};
  EXPECT_EQ(embed->named_parameters().keys(), expected);
  InputEmbedding bare(InputOptions(11, 8).positions(Positions::sinusoidal).norm(InputNorm::rms));
  EXPECT_EQ(bare->named_parameters().keys(),
            (std::vector<std::string>{"token.weight", "norm.weight"}));
}

TEST(InputModule, PartsOfABatchDropAsTheWhole) {
  InputEmbedding embed(bert().dropout(0.5));
  const torch::Tensor seed = torch::tensor({42}, torch::kLong), ids = some_ids();
  const InputCall seeded = InputCall().seed(seed);
  const torch::Tensor whole = embed->forward(ids, seeded);
  const torch::Tensor second = embed->forward(ids.slice(0, 1), InputCall(seeded).first_token(4));
  EXPECT_TRUE(torch::equal(second, whole.slice(0, 1)));
  EXPECT_THROW(embed->forward(ids, InputCall(seeded).first_token(-1)), c10::ValueError);
}

TEST(InputModule, SavesNoTableWithoutANorm) {
  InputEmbedding embed(InputOptions(11, 8).max_positions(6).num_types(2).dropout(0.5));
  const torch::Tensor result = embed->forward(some_ids());
  {
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& table : embed->parameters()) table.zero_();
  }
  result.sum().backward();
  for (const torch::Tensor& table : embed->parameters()) {
    EXPECT_TRUE(table.grad().any().item<bool>());
  }
}

TEST(InputModule, ClonesAndPrints) {
  InputEmbedding embed(bert());
  auto copy = std::dynamic_pointer_cast<InputEmbeddingImpl>(embed->clone());
  EXPECT_NE(copy->token->weight.data_ptr(), embed->token->weight.data_ptr());
  EXPECT_TRUE(torch::equal(copy->forward(some_ids()), embed->forward(some_ids())));
  std::ostringstream text;
  text << embed;
  EXPECT_EQ(text.str(),
            "InputEmbedding(\n  (token): TokenEmbedding(11, 8, padding_idx=0)\n"
            "  (position): LearnedPositionalEmbedding(6, 8)\n  (token_type): TokenEmbedding(2, 8)\n"
            "  (norm): LayerNorm((8,), eps=1e-12, elementwise_affine=True)\n)");
}

TEST(InputModule, StandsInASequential) {
  InputEmbedding embed(bert());
  torch::nn::Sequential model(embed);
  EXPECT_TRUE(torch::equal(model->forward(some_ids()), embed->forward(some_ids())));
}

TEST(InputModule, RefusesWhatDoesNotFit) {
  EXPECT_THROW(InputEmbedding(11, 8), c10::ValueError);  // how many positions?
  EXPECT_THROW(InputEmbedding(InputOptions(11, 8).positions(Positions::none).max_positions(3)),
               c10::ValueError);
  EXPECT_THROW(InputEmbedding(bert().dropout(2.0)), c10::ValueError);
  EXPECT_THROW(InputEmbedding(bert().eps(-1e-5)), c10::ValueError);
  EXPECT_THROW(InputEmbedding(bert().eps(NAN)), c10::ValueError);
  EXPECT_THROW(InputEmbedding(bert().norm(InputNorm::none).eps(1e-12)), c10::ValueError);
  EXPECT_THROW(posembed::InputNormImpl(InputNorm::rms, 8, -1.0), c10::ValueError);
  InputEmbedding embed(bert());
  EXPECT_THROW(embed->forward(some_ids()[0]), c10::ValueError);
  EXPECT_THROW(embed->forward(some_ids() + 1), c10::IndexError);
  EXPECT_THROW(embed->forward(some_ids(), InputCall().offset(3)), c10::IndexError);
}

}  // namespace
