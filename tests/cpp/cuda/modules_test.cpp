// Compares every C++ module on CUDA with the same module on the CPU, values and gradients, and
// tests errors that kernels record. Without a GPU the tests skip and say why.
#include <gtest/gtest.h>
#include <torch/cuda.h>

#include <algorithm>
#include <functional>

#include "posembed/posembed.h"

namespace {

using torch::Tensor;

class ModulesCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device on this machine";
    if (posembed::build_info().cuda_version.empty()) GTEST_SKIP() << "posembed is built for CPU";
    torch::manual_seed(0);
  }
};

void expect_close(const Tensor& cuda, const Tensor& cpu) {
  ASSERT_TRUE(cuda.is_cuda());
  const double largest = std::max(1.0, cpu.abs().max().item<double>());
  EXPECT_LE((cuda.cpu() - cpu).abs().max().item<double>(), 1e-5 * largest);
}

/// Runs `call` on both devices; compares the result and the gradients of the parameters.
template <typename Module>
void expect_same(Module& module, const std::function<Tensor(torch::Device)>& call) {
  std::vector<Tensor> results, gradients[2];
  for (const torch::Device device : {torch::Device("cpu"), torch::Device("cuda")}) {
    module->to(device);
    module->zero_grad();
    const Tensor result = call(device);
    if (result.requires_grad()) result.pow(2).sum().backward();
    for (const Tensor& parameter : module->parameters()) {
      gradients[results.size()].push_back(parameter.grad().clone());
    }
    results.push_back(result.detach());
  }
  expect_close(results[1], results[0]);
  for (size_t i = 0; i < gradients[0].size(); ++i) expect_close(gradients[1][i], gradients[0][i]);
}

Tensor ids() { return torch::tensor({{1, 5, 1}, {0, 2, 5}}); }

TEST_F(ModulesCuda, Token) {
  posembed::TokenEmbedding token(posembed::TokenOptions(6, 16));
  expect_same(token, [&](torch::Device device) { return token->forward(ids().to(device)); });
}

TEST_F(ModulesCuda, Bag) {
  for (const auto mode : {posembed::BagMode::sum, posembed::BagMode::mean, posembed::BagMode::max}) {
    posembed::TokenBag bag(posembed::TokenBagOptions(6, 16).mode(mode).padding_idx(2));
    expect_same(bag, [&](torch::Device device) {
      return bag->forward(ids().flatten().to(device), torch::tensor({0, 4, 4}).to(device));
    });
  }
}

TEST_F(ModulesCuda, Learned) {
  posembed::LearnedPositionalEmbedding position(posembed::LearnedOptions(8, 16));
  const Tensor x = torch::randn({2, 3, 16});
  expect_same(position, [&](torch::Device device) { return position->forward(x.to(device)); });
}

TEST_F(ModulesCuda, Sinusoidal) {
  posembed::SinusoidalPositionalEmbedding position(posembed::SinusoidalOptions(16));
  const Tensor x = torch::randn({2, 3, 16});
  expect_same(position, [&](torch::Device device) { return position->forward(x.to(device)); });
}

TEST_F(ModulesCuda, Rotary) {
  posembed::RotaryEmbedding rope(posembed::RotaryOptions(16));
  const Tensor query = torch::randn({2, 3, 4, 16});
  expect_same(rope, [&](torch::Device device) { return rope->forward(query.to(device)); });
}

TEST_F(ModulesCuda, ALiBi) {
  posembed::ALiBi alibi(posembed::ALiBiOptions(4).causal(false).learned(true));
  expect_same(alibi, [&](torch::Device) { return alibi->forward(5, 7); });
}

TEST_F(ModulesCuda, Input) {
  posembed::InputEmbedding embed(posembed::InputOptions(6, 16)
                                     .positions(posembed::Positions::learned)
                                     .max_positions(8)
                                     .norm(posembed::InputNorm::layer));
  expect_same(embed, [&](torch::Device device) { return embed->forward(ids().to(device)); });
}

TEST_F(ModulesCuda, BadIdIsRaisedLaterAndTheContextLives) {
  posembed::TokenEmbedding token(posembed::TokenOptions(6, 16));
  token->to(torch::kCUDA);
  const Tensor rows = token->forward(torch::tensor({1, 99, 2}).to(torch::kCUDA));
  EXPECT_THROW(posembed::check_errors(), c10::IndexError);
  EXPECT_EQ(rows[1].abs().sum().item<float>(), 0.0f);
  posembed::check_errors();
  EXPECT_EQ(torch::ones({4}, torch::kCUDA).sum().item<float>(), 4.0f);
}

TEST(Errors, NoneOnTheCpu) { EXPECT_NO_THROW(posembed::check_errors()); }

}  // namespace
