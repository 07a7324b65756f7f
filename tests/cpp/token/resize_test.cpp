// Tests TokenEmbedding::resize, select and train_rows: rows, and optimizers' state.
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "posembed/token.h"

namespace {

using posembed::ResizeOptions;
using posembed::TokenEmbedding;
using posembed::TokenOptions;
using torch::Tensor;

Tensor trained_ids() { return torch::tensor({{1, 2, 1}, {0, 4, 1}}); }

/// Checks the last step of two equal tables, one of which grew and shrank again.
template <typename Optimizer, typename Options>
void expect_state_survives(const Options& options) {
  const Tensor values = torch::randn({5, 8});
  std::vector<Tensor> results;
  for (const bool resizes : {false, true}) {
    auto token = TokenEmbedding::from_pretrained(values.clone(), /*freeze=*/false);
    Optimizer optimizer(token->parameters(), options);
    for (int step = 0; step < 4; ++step) {
      if (resizes && step == 2) {
        token->resize(9, {}, &optimizer);
        EXPECT_FALSE(token->weight.grad().defined());
      }
      if (resizes && step == 3) token->resize(5, {}, &optimizer);
      optimizer.zero_grad();
      token->forward(trained_ids()).pow(2).sum().backward();
      optimizer.step();
    }
    results.push_back(token->weight.detach());
  }
  EXPECT_TRUE(torch::equal(results[0], results[1]));
}

TEST(TokenResize, OptimizersKeepWhatTheyKnow) {
  expect_state_survives<torch::optim::Adam>(torch::optim::AdamOptions(0.1).amsgrad(true));
  expect_state_survives<torch::optim::AdamW>(torch::optim::AdamWOptions(0.1));
  expect_state_survives<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9));
}

TEST(TokenResize, AHeadGrowsToo) {
  TokenEmbedding token(5, 8);
  torch::nn::Linear head(8, 5);
  std::vector<Tensor> parameters = head->parameters();
  parameters.push_back(token->weight);
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(0.1));
  const Tensor weight = head->weight.detach().clone(), bias = head->bias.detach().clone();
  const auto step = [&] {
    optimizer.zero_grad();
    head->forward(token->forward(trained_ids())).pow(2).sum().backward();
    optimizer.step();
  };
  token->resize(6, ResizeOptions().pad_to_multiple_of(4).head(head.ptr()), &optimizer);
  EXPECT_EQ(token->weight.sizes(), at::IntArrayRef({8, 8}));
  EXPECT_EQ(head->options.out_features(), 8);
  EXPECT_TRUE(torch::equal(head->weight.narrow(0, 0, 5), weight));
  EXPECT_TRUE(torch::allclose(head->weight[6], weight.mean(0)));
  EXPECT_TRUE(torch::equal(head->bias.narrow(0, 0, 5), bias));
  EXPECT_TRUE(torch::allclose(head->bias.narrow(0, 5, 3), bias.mean().expand({3})));
  step();
  token->resize(9, ResizeOptions().head(head.ptr()), &optimizer);
  step();
  EXPECT_EQ(head->bias.sizes(), at::IntArrayRef({9}));
  torch::nn::Linear tied(torch::nn::LinearOptions(8, 9).bias(false)), other(8, 5);
  tied->weight = token->weight;
  token->resize(12, ResizeOptions().head(tied.ptr()));
  EXPECT_EQ(tied->weight.data_ptr(), token->weight.data_ptr());
  EXPECT_THROW(token->resize(13, ResizeOptions().head(other.ptr())), c10::ValueError);
  EXPECT_THROW(token->resize(13, ResizeOptions().pad_to_multiple_of(0)), c10::ValueError);
  EXPECT_THROW(token->resize(13, ResizeOptions().head(head.ptr())), c10::ValueError);
}

TEST(TokenSelect, KeepsRowsOfTableHeadAndOptimizer) {
  TokenEmbedding token(TokenOptions(5, 8).padding_idx(0));
  torch::nn::Linear head(8, 5);
  std::vector<Tensor> parameters = head->parameters();
  parameters.push_back(token->weight);
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(0.1));
  head->forward(token->forward(trained_ids())).pow(2).sum().backward();
  optimizer.step();
  const auto moment = [&](const Tensor& parameter) {
    auto& state = optimizer.state().at(parameter.unsafeGetTensorImpl());
    return static_cast<torch::optim::AdamWParamState&>(*state).exp_avg();
  };
  const Tensor rows = torch::tensor({4, 0, 1, 1}, torch::kInt);
  std::vector<Tensor> expected;
  for (const Tensor& each : parameters) {
    expected.push_back(each.detach().index({rows}));
    expected.push_back(moment(each).index({rows}));
  }
  token->select(rows, head.ptr(), &optimizer);
  for (size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(torch::equal(parameters[i], expected[2 * i]));
    EXPECT_TRUE(torch::equal(moment(parameters[i]), expected[2 * i + 1]));
  }
  EXPECT_EQ(token->options.num_embeddings(), 4);
  EXPECT_EQ(token->options.padding_idx(), 1);
  EXPECT_EQ(head->options.out_features(), 4);
  EXPECT_THROW(token->select(torch::tensor({1, 4})), c10::IndexError);
  EXPECT_THROW(token->select(torch::tensor({0, 2})), c10::ValueError);
  EXPECT_THROW(token->select(torch::ones({2})), c10::TypeError);
}

TEST(TokenTrainRows, OnlyTheseLearnAndKeepTheirState) {
  TokenEmbedding token(TokenOptions(5, 8).padding_idx(0).scale(2.0));
  const Tensor before = token->weight.detach().clone();
  torch::optim::AdamW optimizer(token->parameters(), torch::optim::AdamWOptions(0.1).weight_decay(0.1));
  token->train_rows(torch::tensor({4, 1, 0}), &optimizer);
  EXPECT_TRUE(torch::equal(token->trained_rows, torch::tensor({1, 4})));
  EXPECT_TRUE(torch::equal(token->forward(trained_ids()), before.index({trained_ids()}) * 2.0));
  const auto step = [&] {
    optimizer.zero_grad();
    const Tensor hidden = token->forward(trained_ids());
    (hidden.pow(2).sum() + token->logits(hidden).pow(2).sum()).backward();
    optimizer.step();
  };
  step();
  const auto copy = std::dynamic_pointer_cast<posembed::TokenEmbeddingImpl>(token->clone());
  EXPECT_TRUE(torch::equal(copy->forward(trained_ids()), token->forward(trained_ids())));
  EXPECT_NE(copy->trained.data_ptr(), token->trained.data_ptr());
  EXPECT_THROW(token->resize(9), c10::ValueError);
  EXPECT_THROW(token->select(torch::tensor({0})), c10::ValueError);
  EXPECT_THROW(token->quantize(), c10::ValueError);
  EXPECT_THROW(token->train_rows(torch::tensor({5})), c10::IndexError);
  const Tensor moments =
      static_cast<torch::optim::AdamWParamState&>(*optimizer.state().at(token->trained.unsafeGetTensorImpl()))
          .exp_avg()
          .clone();
  token->train_rows(std::nullopt, &optimizer);
  EXPECT_TRUE(token->weight.requires_grad());
  EXPECT_EQ(token->parameters().size(), 1u);
  EXPECT_TRUE(optimizer.param_groups()[0].params()[0].is_same(token->weight));
  const Tensor changed = token->weight.ne(before).all(1);
  EXPECT_TRUE(torch::equal(changed, torch::tensor({false, true, false, false, true})));
  const Tensor all =
      static_cast<torch::optim::AdamWParamState&>(*optimizer.state().at(token->weight.unsafeGetTensorImpl())).exp_avg();
  EXPECT_TRUE(torch::equal(all.index({torch::tensor({1, 4})}), moments));
  EXPECT_EQ(all.ne(0).any(1).sum().item<int64_t>(), 2);
  step();
  token->freeze_rows(torch::tensor({0, 1, 2}));
  EXPECT_TRUE(torch::equal(token->trained_rows, torch::tensor({3, 4})));
}

TEST(TokenResize, RefusesWhatDoesNotFitAndChangesNothing) {
  TokenEmbedding token(TokenOptions(5, 8).padding_idx(3)), other(5, 8);
  EXPECT_THROW(token->resize(3), c10::ValueError);
  EXPECT_THROW(token->resize(7, ResizeOptions().rows(torch::ones({1, 8}))), c10::ValueError);
  torch::optim::SGD of_another(other->parameters(), 0.1);
  EXPECT_THROW(token->resize(7, {}, &of_another), c10::ValueError);
  EXPECT_EQ(token->weight.size(0), 5);
  EXPECT_EQ(token->options.num_embeddings(), 5);
}

}  // namespace
