// Tests ALiBi as C++ programs use it: options, gradients, copies, printed form, errors.
#include <ATen/ops/scaled_dot_product_attention.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <limits>
#include <sstream>

#include "posembed/alibi.h"

namespace {

using posembed::ALiBi;
using posembed::ALiBiCall;
using posembed::ALiBiOptions;
using posembed::Slopes;

TEST(ALiBiModule, SubtractsSlopeTimesDistance) {
  ALiBi alibi(ALiBiOptions(8));
  const torch::Tensor bias = alibi->forward(2, 3);
  constexpr float hidden = -std::numeric_limits<float>::infinity();
  EXPECT_TRUE(torch::equal(bias[0], torch::tensor({{-0.5f, 0.0f, hidden}, {-1.0f, -0.5f, 0.0f}})));
  EXPECT_TRUE(torch::equal(bias[7].slice(1, 0, 1), bias[0].slice(1, 0, 1) / 128));
}

TEST(ALiBiModule, OffsetMovesTheQueries) {
  ALiBi alibi(ALiBiOptions(4).causal(false));
  const torch::Tensor all = alibi->forward(7);
  const torch::Tensor moved = alibi->forward(2, 7, ALiBiCall().query_offset(3));
  EXPECT_TRUE(torch::equal(moved, all.slice(1, 3, 5)));
}

TEST(ALiBiModule, LearnedSlopesHaveGradients) {
  ALiBi alibi(ALiBiOptions(3).causal(false).learned(true));
  alibi->forward(4).sum().backward();
  // The distances of a 4 x 4 block add up to 20, the same for every head.
  EXPECT_TRUE(torch::equal(alibi->slopes().grad(), torch::full({3}, -20.0f)));
  EXPECT_EQ(alibi->named_parameters().keys(), std::vector<std::string>{"slopes"});
}

TEST(ALiBiModule, AddsInPlaceWhatItReturns) {
  ALiBi alibi(ALiBiOptions(4).slopes(torch::rand({2, 4})).causal(false));
  const torch::Tensor scores = torch::randn({2, 4, 3, 5});
  const torch::Tensor expected = scores + alibi->forward(3, 5);
  EXPECT_TRUE(alibi->add_(scores).is_same(scores));
  EXPECT_TRUE(torch::allclose(scores, expected, 1e-6, 1e-6));  // the sum is rounded once
}

TEST(ALiBiModule, WritesTheBiasToMemoryAtHand) {
  ALiBi alibi(ALiBiOptions(4));
  const torch::Tensor memory = torch::zeros({4, 3, 8}), out = memory.slice(2, 1, 6);
  EXPECT_TRUE(alibi->forward_out(out).is_same(out));
  EXPECT_TRUE(torch::equal(out, alibi->forward(3, 5)));
  EXPECT_EQ(memory.select(2, 0).abs().max().item<float>(), 0.0f);
  EXPECT_THROW(alibi->forward_out(torch::zeros({3, 5})), c10::ValueError);
  EXPECT_THROW(alibi->forward_out(torch::zeros({2, 3, 5})), c10::ValueError);
}

TEST(ALiBiModule, AttendsWithTheBias) {
  ALiBi alibi(ALiBiOptions(4));
  const torch::Tensor query = torch::randn({2, 4, 3, 8}), key = torch::randn({2, 2, 5, 8});
  const torch::Tensor expected = at::scaled_dot_product_attention(
      query, key, key, alibi->forward(3, 5), 0.0, false, std::nullopt, /*enable_gqa=*/true);
  EXPECT_TRUE(torch::allclose(alibi->attention(query, key, key), expected, 1e-5, 1e-6));
}

TEST(ALiBiModule, AttentionHasAScaleOfItsOwn) {
  ALiBi alibi(ALiBiOptions(4));
  const torch::Tensor query = torch::randn({2, 4, 3, 8}), key = torch::randn({2, 4, 5, 8});
  const torch::Tensor scores = query.matmul(key.transpose(-2, -1));
  for (const double scale : {1.0, 1.0 / 8}) {
    const ALiBiCall call = ALiBiCall().scale(scale);
    const torch::Tensor expected = alibi->softmax(scores, call).matmul(key);
    EXPECT_TRUE(torch::allclose(alibi->attention(query, key, key, call), expected, 1e-5, 1e-6));
  }
}

TEST(ALiBiModule, OpensASequential) {
  ALiBi alibi(4);
  torch::nn::Sequential model(alibi, torch::nn::Softmax(-1));
  EXPECT_TRUE(torch::equal(model->forward(int64_t{5}), alibi->forward(5).softmax(-1)));
}

TEST(ALiBiModule, FunctionsNumberVisibleKeysOnRequest) {
  ALiBi alibi(2);
  const torch::Tensor scores = torch::randn({1, 2, 2, 4});
  const ALiBiCall call = ALiBiCall().attention_mask(torch::tensor({1, 0, 1, 1}));
  const torch::Tensor all = posembed::functional::alibi_softmax(scores, alibi->slopes(), call);
  EXPECT_FALSE(torch::equal(alibi->softmax(scores, call), all));
  const torch::Tensor visible = posembed::functional::alibi_softmax(
      scores, alibi->slopes(), ALiBiCall(call).positions_from_mask(true));
  EXPECT_TRUE(torch::equal(alibi->softmax(scores, call), visible));
}

TEST(ALiBiModule, AttentionNamesWhatDoesNotFit) {
  ALiBi alibi(4);
  const torch::Tensor query = torch::zeros({2, 4, 3, 8}), key = torch::zeros({2, 2, 5, 8});
  EXPECT_THROW(alibi->attention(query[0], key, key), c10::ValueError);
  EXPECT_THROW(alibi->attention(query, key.narrow(3, 0, 6), key), c10::ValueError);
  EXPECT_THROW(alibi->attention(query, key, key.narrow(2, 0, 3)), c10::ValueError);
  EXPECT_THROW(alibi->attention(query, key, key.narrow(0, 0, 1)), c10::ValueError);
  EXPECT_THROW(alibi->attention(query, key, key.to(torch::kDouble)), c10::TypeError);
  EXPECT_THROW(alibi->attention(query, key, key, {}, 1.5), c10::ValueError);
  EXPECT_THROW(alibi->add_(torch::zeros({8})), c10::ValueError);
  EXPECT_THROW(alibi->alibi_slopes(-1), c10::ValueError);
}

TEST(ALiBiModule, SoftmaxInPlaceAndApart) {
  ALiBi alibi(ALiBiOptions(4));
  const torch::Tensor scores = torch::randn({2, 4, 3, 5});
  const ALiBiCall call = ALiBiCall().scale(0.5);
  const torch::Tensor expected = (scores * 0.5 + alibi->forward(3, 5)).softmax(-1);
  EXPECT_TRUE(torch::allclose(alibi->softmax(scores, call), expected, 1e-5, 1e-6));
  EXPECT_TRUE(alibi->softmax_(scores, call).is_same(scores));
  EXPECT_TRUE(torch::allclose(scores, expected, 1e-5, 1e-6));
}

TEST(ALiBiModule, LeftPaddingChangesNothing) {
  ALiBi alibi(ALiBiOptions(2));
  const torch::Tensor query = torch::randn({1, 2, 6, 4}), key = torch::randn({1, 2, 6, 4});
  const ALiBiCall call = ALiBiCall().attention_mask(torch::tensor({0, 0, 1, 1, 1, 1}).unsqueeze(0));
  const auto real = [](const torch::Tensor& tensor) { return tensor.slice(2, 2); };
  const torch::Tensor alone = alibi->attention(real(query), real(key), real(key));
  EXPECT_TRUE(torch::allclose(real(alibi->attention(query, key, key, call)), alone, 1e-5, 1e-6));
}

TEST(ALiBiModule, GradientsReachScoresAndSlopes) {
  ALiBi alibi(ALiBiOptions(2).learned(true));
  const torch::Tensor scores = torch::randn({2, 3, 4}, torch::requires_grad());
  alibi->softmax(scores).square().sum().backward();
  EXPECT_TRUE(scores.grad().defined());
  EXPECT_GT(alibi->slopes().grad().abs().min().item<float>(), 0.0f);
}

TEST(ALiBiModule, PresetsAreOptions) {
  ALiBi falcon(ALiBiOptions::preset("falcon", 8, 64));
  EXPECT_TRUE(torch::equal(falcon->slopes(), posembed::functional::alibi_slopes(8) / 8));
  EXPECT_FALSE(ALiBiOptions::preset("mosaicbert", 12).causal());
  EXPECT_FALSE(ALiBiOptions::preset("jina", 12).causal());
  for (const char* name : {"bloom", "btlm", "refact"}) {
    EXPECT_TRUE(ALiBiOptions::preset(name, 12).causal()) << name;
  }
  EXPECT_THROW(ALiBiOptions::preset("gpt", 12), c10::ValueError);
  EXPECT_THROW(ALiBiOptions::preset("falcon", 12), c10::ValueError);
}

TEST(ALiBiModule, SlopesForFlashAttention) {
  ALiBi alibi(ALiBiOptions(4).train_length(8));
  EXPECT_THROW(alibi->alibi_slopes(), c10::ValueError);
  EXPECT_TRUE(torch::equal(alibi->alibi_slopes(2, 16), (alibi->slopes() / 2).expand({2, 4})));
}

TEST(ALiBiModule, TheLastShardIsPadded) {
  const ALiBi alibi(ALiBiOptions(9).total_heads(66).head_start(63));
  const torch::Tensor whole = posembed::functional::alibi_slopes(66);
  EXPECT_TRUE(torch::equal(alibi->slopes(), torch::constant_pad_nd(whole.slice(0, 63), {0, 6})));
}

TEST(ALiBiModule, ClonesAndCastsKeepTheSlopes) {
  ALiBi alibi(ALiBiOptions(12).total_heads(16).head_start(4));
  EXPECT_TRUE(alibi->parameters().empty());
  EXPECT_TRUE(alibi->buffers().empty());
  auto copy = std::dynamic_pointer_cast<posembed::ALiBiImpl>(alibi->clone());
  copy->to(torch::kBFloat16);
  EXPECT_TRUE(torch::equal(copy->slopes(), alibi->slopes()));
  EXPECT_EQ(copy->forward(3).scalar_type(), torch::kBFloat16);
  EXPECT_EQ(alibi->forward(3).scalar_type(), torch::kFloat32);
}

TEST(ALiBiModule, CloneOnAnotherDeviceHasItsSlopesThere) {
  const ALiBi alibi(8);
  const auto copy = std::dynamic_pointer_cast<posembed::ALiBiImpl>(alibi->clone(torch::kMeta));
  EXPECT_TRUE(copy->slopes().is_meta());
  EXPECT_TRUE(copy->forward(3).is_meta());
  EXPECT_TRUE(alibi->slopes().is_cpu());
}

TEST(ALiBiModule, CloneOfLearnedSlopesIsApart) {
  ALiBi alibi(ALiBiOptions(2).learned(true));
  auto copy = std::dynamic_pointer_cast<posembed::ALiBiImpl>(alibi->clone());
  {
    const torch::NoGradGuard no_grad;
    copy->slopes().zero_();
  }
  EXPECT_TRUE(torch::equal(copy->slopes(), torch::zeros({2})));
  EXPECT_TRUE(torch::equal(alibi->slopes(), posembed::functional::alibi_slopes(2)));
}

TEST(ALiBiModule, PrintsItsOptions) {
  std::ostringstream text;
  text << ALiBi(ALiBiOptions(4).slopes(Slopes::geometric).total_heads(8).learned(true));
  EXPECT_EQ(text.str(),
            "ALiBi(4, slopes='geometric', max_bias=8, total_heads=8, head_start=0, learned=True)");
}

TEST(ALiBiModule, BadInputRaisesC10Errors) {
  EXPECT_THROW(ALiBi(ALiBiOptions(0)), c10::ValueError);
  EXPECT_THROW(ALiBi(ALiBiOptions(4).total_heads(6).head_start(3)), c10::ValueError);
  EXPECT_THROW(ALiBi(ALiBiOptions(4).slopes(torch::rand({3}))), c10::ValueError);
  ALiBi alibi(ALiBiOptions(4));
  EXPECT_THROW(alibi->forward(-1), c10::ValueError);
  EXPECT_THROW(alibi->forward(3, 3, {}, torch::kInt), c10::TypeError);
  EXPECT_THROW(alibi->add_(torch::randn({2, 3, 4, 4})), c10::ValueError);
}

TEST(ALiBiModule, RefusesOptionsThatItHasItself) {
  const torch::Tensor scores = torch::randn({1, 4, 3, 3});
  for (const bool causal : {true, false}) {
    ALiBi alibi(ALiBiOptions(4).causal(causal));
    EXPECT_TRUE(
        torch::equal(alibi->softmax(scores, ALiBiCall().causal(causal)), alibi->softmax(scores)));
    EXPECT_THROW(alibi->softmax(scores, ALiBiCall().causal(!causal)), c10::ValueError);
    EXPECT_THROW(alibi->softmax(scores, ALiBiCall().positions_from_mask(false)), c10::ValueError);
    EXPECT_THROW(alibi->forward(3, 3, ALiBiCall().scale(0.5)), c10::ValueError);
  }
}

}  // namespace
