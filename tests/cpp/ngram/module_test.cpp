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
}

}  // namespace
