// Tests NgramEmbedding and PerLayerEmbedding as C++ programs use them.
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include "posembed/ngram.h"

namespace {

using posembed::NgramEmbedding;
using posembed::NgramOptions;
using posembed::NgramSpec;
using posembed::PerLayerEmbedding;

NgramSpec small_spec() {
  NgramSpec spec;
  spec.multipliers({3, 5, 7}).moduli({11, 13, 17, 19}).boundary(2);
  return spec;
}

TEST(NgramModule, PaddingIsNoText) {
  NgramEmbedding memory(NgramOptions(small_spec(), 8));
  const torch::Tensor text = torch::tensor({{5, 6, 4, 1}}), padding = torch::tensor({{9, 9}});
  const torch::Tensor alone = memory->forward(text);
  const torch::Tensor left = torch::cat({padding, text}, 1), right = torch::cat({text, padding}, 1);
  const torch::Tensor mask = torch::tensor({{0, 0, 1, 1, 1, 1}}), lengths = torch::tensor({4});
  const auto masked = posembed::NgramCall().mask(mask), counted = posembed::NgramCall().lengths(lengths);
  EXPECT_TRUE(torch::equal(memory->forward(left, masked).narrow(1, 2, 4), alone));
  EXPECT_TRUE(torch::equal(memory->forward(right, counted).narrow(1, 0, 4), alone));
  const torch::Tensor last = torch::tensor({{4, 1}});
  EXPECT_TRUE(torch::equal(memory->next_history(left, masked), last));
  EXPECT_TRUE(torch::equal(memory->next_history(right, counted), last));
  EXPECT_TRUE(torch::equal(memory->next_history(text, posembed::NgramCall().lengths(torch::tensor({1}))),
                           torch::tensor({{2, 5}})));
  EXPECT_THROW(memory->next_history(text, posembed::NgramCall().history(text)), c10::ValueError);
  EXPECT_THROW(memory->next_history(left, posembed::NgramCall().mask(mask.to(torch::kFloat))), c10::TypeError);
  EXPECT_THROW(memory->forward(left, posembed::NgramCall().mask(mask).lengths(lengths)), c10::ValueError);
  EXPECT_THROW(memory->forward(left, posembed::NgramCall().lengths(torch::tensor({7}))), c10::ValueError);
  EXPECT_THROW(memory->next_history(left, posembed::NgramCall().cu_seqlens(torch::tensor({0, 6}))), c10::ValueError);
}

TEST(NgramModule, HasTheNumbersOfLongcat) {
  const NgramSpec spec = NgramSpec::longcat(163'840, 2, 3, 2, 100.567);
  EXPECT_EQ(spec.moduli(), (std::vector<int64_t>{16'476'898, 16'476'900, 16'476'902, 16'476'904}));
  EXPECT_EQ(spec.table_rows(), 4 * 16'476'901);
}

TEST(NgramModule, RefusesNumbersThatDoNotFit) {
  EXPECT_THROW(NgramEmbedding(NgramOptions(small_spec().num_embeddings(59), 8)), c10::ValueError);
  EXPECT_THROW(NgramEmbedding(NgramOptions(small_spec().moduli({1, 0}), 8)), c10::ValueError);
  EXPECT_THROW(NgramSpec::qwen4_exp(50, 2, 0, 3, 0), c10::ValueError);
  // Products that wrap: layer 0, 0 columns.
  EXPECT_THROW(NgramSpec::qwen4_exp(50, 2, int64_t{1} << 60, 3, 8, 90), c10::ValueError);
  EXPECT_THROW(NgramSpec::longcat(50, 2, 1), c10::ValueError);
  EXPECT_THROW(NgramSpec::longcat(int64_t{1} << 40).table_rows(), c10::ValueError);
  EXPECT_THROW(PerLayerEmbedding(10, int64_t{1} << 32, int64_t{1} << 32), c10::ValueError);
}

}  // namespace
