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
using posembed::PositionRule;
using posembed::TokenEmbedding;

InputOptions bert() {
  return InputOptions(11, 8).max_positions(6).num_types(2).norm(InputNorm::layer).eps(1e-12).padding_idx(0);
}

torch::Tensor input_ids() { return torch::tensor({{1, 2, 0, 9}, {4, 4, 10, 0}}, torch::kLong); }

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
  const torch::Tensor expected = embed->forward(input_ids(), InputCall().types(types).offset(1));
  const torch::Tensor result = posembed::functional::input_embedding(input_ids(), table, parts);
  EXPECT_TRUE(torch::equal(result, expected));
  const torch::Tensor gradient = torch::randn_like(result);
  EXPECT_TRUE(torch::equal(torch::autograd::grad({result}, {table}, {gradient})[0],
                           torch::autograd::grad({expected}, {table}, {gradient})[0]));
  parts.dropout(0.5).seed(torch::tensor({7}, torch::kLong));
  const torch::Tensor dropped = posembed::functional::input_embedding(input_ids(), table, parts);
  EXPECT_TRUE(torch::equal(torch::where(dropped == 0, dropped, 2 * expected), dropped));
  EXPECT_TRUE((dropped == 0).any().item<bool>());
}

TEST(InputModule, PartsOfABatchDropAsTheWhole) {
  InputEmbedding embed(bert().dropout(0.5));
  const torch::Tensor seed = torch::tensor({42}, torch::kLong), ids = input_ids();
  const InputCall seeded = InputCall().seed(seed);
  const torch::Tensor whole = embed->forward(ids, seeded);
  const torch::Tensor second = embed->forward(ids.slice(0, 1), InputCall(seeded).first_token(4));
  EXPECT_TRUE(torch::equal(second, whole.slice(0, 1)));
  EXPECT_THROW(embed->forward(ids, InputCall(seeded).first_token(-1)), c10::ValueError);
  EXPECT_THROW(posembed::InputNormImpl(InputNorm::rms, 8, -1.0), c10::ValueError);
}

TEST(InputModule, SavesNoTableWithoutANorm) {
  InputEmbedding embed(InputOptions(11, 8).max_positions(6).num_types(2).dropout(0.5));
  const torch::Tensor result = embed->forward(input_ids());
  {
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& table : embed->parameters()) table.zero_();
  }
  result.sum().backward();
  for (const torch::Tensor& table : embed->parameters()) {
    EXPECT_TRUE(table.grad().any().item<bool>());
  }
}

TEST(InputModule, PutsFeaturesAmongTokens) {
  const torch::Tensor ids = torch::tensor({{3, -1, -1, 1}, {1, 1, 4, -1}});
  const torch::Tensor mask = ids.lt(0), features = torch::randn({3, 8}).requires_grad_();
  for (const auto rule : {PositionRule::consecutive, PositionRule::roberta}) {
    InputEmbedding embed(InputOptions(5, 8).max_positions(9).padding_idx(1).position_rule(rule).scale(2.0));
    const torch::Tensor rows =
        embed->token->forward(ids.masked_fill(mask, 0)).masked_scatter(mask.unsqueeze(-1), features);
    InputCall given = InputCall().inputs_embeds(rows);
    if (rule == PositionRule::roberta) {
      given.positions(torch::tensor({{0, 1, 2, -1}, {-1, -1, 0, 1}}));
    }
    const torch::Tensor expected = embed->forward({}, given);
    EXPECT_TRUE(torch::equal(embed->with_embeddings(ids, features, mask), expected));
    EXPECT_THROW(embed->with_embeddings(ids, features.narrow(0, 0, 2), mask), c10::ValueError);
    EXPECT_THROW(embed->with_embeddings(ids, features, ids), c10::TypeError);
    embed->token->train_rows(torch::tensor({3}));
    EXPECT_TRUE(torch::equal(embed->with_embeddings(ids, features, mask), expected));
    const torch::Tensor plain = ids.masked_fill(mask, 3);
    embed->forward(plain).sum().backward();
    EXPECT_TRUE(embed->token->trained.grad().defined());
  }
  TokenEmbedding token(5, 8);
  token->with_embeddings(ids, features, mask).sum().backward();
  EXPECT_TRUE(torch::equal(features.grad(), torch::ones({3, 8})));
  EXPECT_TRUE(torch::equal(token->weight.grad().select(1, 0), torch::tensor({0., 3., 0., 1., 1.})));
  token->quantize("int8");
  EXPECT_TRUE(torch::equal(token->with_embeddings(ids, features, mask).index({mask}), features));
}

}  // namespace
