// Tests InputEmbedding as C++ programs use it.
#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/nn/module.h>

#include "posembed/input.h"

namespace {

using posembed::InputCall;
using posembed::InputEmbedding;
using posembed::InputNorm;
using posembed::InputOptions;

TEST(InputFunction, EqualsTheModule) {
  InputEmbedding embed(
      InputOptions(11, 8).max_positions(6).num_types(2).norm(InputNorm::layer).eps(1e-12).padding_idx(0));
  const torch::Tensor ids = torch::tensor({{1, 2, 0, 9}, {4, 4, 10, 0}}, torch::kLong);
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
  const torch::Tensor expected = embed->forward(ids, InputCall().types(types).offset(1));
  const torch::Tensor result = posembed::functional::input_embedding(ids, table, parts);
  EXPECT_TRUE(torch::equal(result, expected));
  const torch::Tensor gradient = torch::randn_like(result);
  EXPECT_TRUE(torch::equal(torch::autograd::grad({result}, {table}, {gradient})[0],
                           torch::autograd::grad({expected}, {table}, {gradient})[0]));
  parts.dropout(0.5).seed(torch::tensor({7}, torch::kLong));
  const torch::Tensor dropped = posembed::functional::input_embedding(ids, table, parts);
  EXPECT_TRUE(torch::equal(torch::where(dropped == 0, dropped, 2 * expected), dropped));
  EXPECT_TRUE((dropped == 0).any().item<bool>());
}

}  // namespace
