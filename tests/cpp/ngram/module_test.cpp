// Tests NgramEmbedding and PerLayerEmbedding as C++ programs use them.
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <sstream>

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

TEST(NgramModule, LooksUpTheRowsOfEachToken) {
  const NgramSpec spec = small_spec();
  EXPECT_EQ(spec.table_rows(), 60);
  EXPECT_EQ(spec.ngram_size(), 3);
  const torch::Tensor ids = torch::tensor({{7, 2, 4}});
  const torch::Tensor rows = posembed::functional::ngram_ids(ids, spec);
  // 7 * 3 ^ 2 * 5 = 31; the heads follow each other.
  EXPECT_EQ(rows[0][0][0].item<int64_t>(), 31 % 11);
  EXPECT_EQ(rows[0][0][1].item<int64_t>(), 31 % 13 + 11);

  NgramEmbedding joined(NgramOptions(spec, 8)), summed(NgramOptions(spec, 2).summed(true));
  EXPECT_TRUE(torch::equal(joined->forward(ids),
                           joined->weight.index_select(0, rows.flatten()).view({1, 3, 8})));
  EXPECT_TRUE(
      torch::allclose(summed->forward(ids),
                      summed->weight.index_select(0, rows.flatten()).view({1, 3, 4, 2}).sum(2)));
}

TEST(NgramModule, AHistoryContinuesAText) {
  NgramEmbedding memory(NgramOptions(small_spec(), 8));
  const torch::Tensor ids = torch::randint(0, 5, {2, 9}, torch::kLong);
  const torch::Tensor whole = memory->forward(ids);
  torch::Tensor history = memory->next_history(ids.narrow(1, 0, 0));
  for (int64_t at = 0; at < 9; ++at) {
    const torch::Tensor token = ids.narrow(1, at, 1);
    EXPECT_TRUE(torch::equal(memory->forward(token, history), whole.narrow(1, at, 1)));
    history = memory->next_history(token, history);
  }
}

TEST(NgramModule, PaddingIsNoText) {
  NgramEmbedding memory(NgramOptions(small_spec(), 8));
  const torch::Tensor text = torch::tensor({{5, 6, 4, 1}}), padding = torch::tensor({{9, 9}});
  const torch::Tensor alone = memory->forward(text);
  const torch::Tensor left = torch::cat({padding, text}, 1), right = torch::cat({text, padding}, 1);
  const torch::Tensor mask = torch::tensor({{0, 0, 1, 1, 1, 1}}), lengths = torch::tensor({4});
  const auto masked = posembed::NgramCall().mask(mask),
             counted = posembed::NgramCall().lengths(lengths);
  EXPECT_TRUE(torch::equal(memory->forward(left, masked).narrow(1, 2, 4), alone));
  EXPECT_TRUE(torch::equal(memory->forward(right, counted).narrow(1, 0, 4), alone));
  const torch::Tensor last = torch::tensor({{4, 1}});
  EXPECT_TRUE(torch::equal(memory->next_history(left, masked), last));
  EXPECT_TRUE(torch::equal(memory->next_history(right, counted), last));
  EXPECT_TRUE(
      torch::equal(memory->next_history(text, posembed::NgramCall().lengths(torch::tensor({1}))),
                   torch::tensor({{2, 5}})));
  EXPECT_THROW(memory->forward(left, posembed::NgramCall().mask(mask).lengths(lengths)),
               c10::ValueError);
  EXPECT_THROW(memory->forward(left, posembed::NgramCall().lengths(torch::tensor({7}))),
               c10::ValueError);
  EXPECT_THROW(memory->next_history(left, posembed::NgramCall().cu_seqlens(torch::tensor({0, 6}))),
               c10::ValueError);
}

TEST(NgramModule, TrainsClonesAndPrints) {
  NgramEmbedding memory(
      NgramOptions(small_spec(), 2).summed(true).gradient(posembed::TableGradient::rows));
  memory->forward(torch::tensor({1, 4})).sum().backward();
  EXPECT_TRUE(memory->weight.grad().is_sparse());
  const auto copy = std::dynamic_pointer_cast<posembed::NgramEmbeddingImpl>(memory->clone());
  EXPECT_TRUE(torch::equal(copy->weight, memory->weight));
  std::ostringstream text;
  text << memory;
  EXPECT_EQ(text.str(),
            "NgramEmbedding(60, 2, ngram_size=3, columns=4, summed=True, gradient='rows')");
}

TEST(NgramModule, RefusesNumbersThatDoNotFit) {
  EXPECT_THROW(NgramEmbedding(NgramOptions(small_spec(), 6)), c10::ValueError);
  EXPECT_THROW(NgramEmbedding(NgramOptions(small_spec().num_embeddings(59), 8)), c10::ValueError);
  EXPECT_THROW(NgramEmbedding(NgramOptions(small_spec().moduli({1, 0}), 8)), c10::ValueError);
  EXPECT_THROW(NgramSpec::qwen4_exp(50, 2, 0, 3, 0), c10::ValueError);
  // Products that wrap: layer 0, 0 columns, 0 rows.
  EXPECT_THROW(NgramSpec::qwen4_exp(50, 2, int64_t{1} << 60, 3, 8, 90), c10::ValueError);
  EXPECT_THROW(NgramSpec::qwen4_exp(50, 2, 0, 3, 4, 90, 1, int64_t{1} << 62 | 1), c10::ValueError);
  EXPECT_THROW(PerLayerEmbedding(10, int64_t{1} << 32, int64_t{1} << 32), c10::ValueError);
}

TEST(PerLayerModule, ALayerIsAPartOfTheRow) {
  PerLayerEmbedding table(10, 3, 4, 2.0);
  const torch::Tensor ids = torch::tensor({{1, 9}, {0, 1}});
  const torch::Tensor all = table->forward(ids);
  EXPECT_EQ(all.sizes(), torch::IntArrayRef({2, 2, 3, 4}));
  EXPECT_TRUE(torch::equal(all, (2 * table->weight).index_select(0, ids.flatten()).view_as(all)));
  EXPECT_TRUE(torch::equal(table->layer(ids, 1), all.select(2, 1)));
  EXPECT_TRUE(torch::equal(table->layer(ids, -1), all.select(2, 2)));
  EXPECT_THROW(table->layer(ids, 3), c10::IndexError);
  EXPECT_THROW(PerLayerEmbedding(10, 0, 4), c10::ValueError);
  std::ostringstream text;
  text << table;
  EXPECT_EQ(text.str(), "PerLayerEmbedding(10, 3, 4, scale=2)");
}

}  // namespace
