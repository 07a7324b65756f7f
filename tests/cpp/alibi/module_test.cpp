// Tests ALiBi as C++ programs use it: options, copies, errors.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/module.h>

#include "posembed/alibi.h"

namespace {

using posembed::ALiBi;
using posembed::ALiBiCall;
using posembed::ALiBiOptions;

TEST(ALiBiModule, WritesTheBiasToMemoryAtHand) {
  ALiBi alibi(ALiBiOptions(4));
  const torch::Tensor memory = torch::zeros({4, 3, 8}), out = memory.slice(2, 1, 6);
  EXPECT_TRUE(alibi->forward_out(out).is_same(out));
  EXPECT_TRUE(torch::equal(out, alibi->forward(3, 5)));
  EXPECT_EQ(memory.select(2, 0).abs().max().item<float>(), 0.0f);
  EXPECT_THROW(alibi->forward_out(torch::zeros({3, 5})), c10::ValueError);
  EXPECT_THROW(alibi->forward_out(torch::zeros({2, 3, 5})), c10::ValueError);
}

TEST(ALiBiModule, FunctionsNumberVisibleKeysOnRequest) {
  ALiBi alibi(2);
  const torch::Tensor scores = torch::randn({1, 2, 2, 4});
  const ALiBiCall call = ALiBiCall().attention_mask(torch::tensor({1, 0, 1, 1}));
  const torch::Tensor all = posembed::functional::alibi_softmax(scores, alibi->slopes(), call);
  EXPECT_FALSE(torch::equal(alibi->softmax(scores, call), all));
  const torch::Tensor visible =
      posembed::functional::alibi_softmax(scores, alibi->slopes(), ALiBiCall(call).positions_from_mask(true));
  EXPECT_TRUE(torch::equal(alibi->softmax(scores, call), visible));
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

TEST(ALiBiModule, CloneOnAnotherDeviceHasItsSlopesThere) {
  const ALiBi alibi(8);
  const auto copy = std::dynamic_pointer_cast<posembed::ALiBiImpl>(alibi->clone(torch::kMeta));
  EXPECT_TRUE(copy->slopes().is_meta());
  EXPECT_TRUE(copy->forward(3).is_meta());
  EXPECT_TRUE(alibi->slopes().is_cpu());
}

TEST(ALiBiModule, RefusesOptionsThatItHasItself) {
  const torch::Tensor scores = torch::randn({1, 4, 3, 3});
  for (const bool causal : {true, false}) {
    ALiBi alibi(ALiBiOptions(4).causal(causal));
    EXPECT_TRUE(torch::equal(alibi->softmax(scores, ALiBiCall().causal(causal)), alibi->softmax(scores)));
    EXPECT_THROW(alibi->softmax(scores, ALiBiCall().causal(!causal)), c10::ValueError);
    EXPECT_THROW(alibi->softmax(scores, ALiBiCall().positions_from_mask(false)), c10::ValueError);
    EXPECT_THROW(alibi->forward(3, 3, ALiBiCall().scale(0.5)), c10::ValueError);
  }
}

}  // namespace
