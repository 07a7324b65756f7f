// Tests TokenEmbedding as C++ programs use it: agreement with torch::nn::Embedding, gradients,
// copies, errors.
#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "posembed/bag.h"
#include "posembed/file_table.h"
#include "posembed/mapped_memory.h"
#include "posembed/pretrained.h"
#include "posembed/quantized.h"
#include "posembed/token.h"

namespace {

using posembed::TokenEmbedding;
using posembed::TokenOptions;

torch::Tensor token_ids() { return torch::tensor({{1, 2, 1}, {0, 4, 1}}, torch::kLong); }

TEST(TokenModule, ScaleFollowsTheWidthThatItIsGivenLater) {
  const torch::Tensor table = torch::ones({5, 16});
  const torch::Tensor four = torch::full({1, 16}, 4.0), id = torch::zeros({1}, torch::kLong);
  TokenEmbedding token = TokenEmbedding::from_pretrained(table, true, TokenOptions(0, 0).sqrt_dim());
  EXPECT_TRUE(torch::equal(token->forward(id), four));
  EXPECT_EQ(TokenOptions(5, 4).sqrt_dim().embedding_dim(16).scale(), 4.0);
  EXPECT_EQ(TokenOptions(5, 4).sqrt_dim().scale(3.0).scale(), 3.0);
}

TEST(TokenModule, FromPretrainedSharesAndFreezes) {
  const torch::Tensor table = torch::randn({4, 2});
  TokenEmbedding token = TokenEmbedding::from_pretrained(table);
  EXPECT_EQ(token->weight.data_ptr(), table.data_ptr());
  EXPECT_FALSE(token->weight.requires_grad());
  EXPECT_TRUE(TokenEmbedding::from_pretrained(table, /*freeze=*/false)->weight.requires_grad());
  EXPECT_THROW(TokenEmbedding(TokenOptions(4, 3)._weight(table)), c10::ValueError);
}

TEST(TokenFunctional, PartsOfAVocabularyAddUpToTheWhole) {
  const torch::Tensor table = torch::randn({5, 8}), whole = table.clone().requires_grad_();
  const torch::Tensor rows = posembed::functional::embedding(token_ids(), whole);
  rows.sum().backward();
  torch::Tensor sum = torch::zeros_like(rows);
  std::vector<torch::Tensor> gradients;
  for (const auto& [start, end] : {std::pair{0, 2}, std::pair{2, 5}}) {
    const torch::Tensor part = table.slice(0, start, end).clone().requires_grad_();
    const auto call = posembed::EmbeddingCall().vocabulary_start(start);
    const torch::Tensor of_part = posembed::functional::embedding(token_ids(), part, call);
    of_part.sum().backward();
    sum += of_part.detach();
    gradients.push_back(part.grad());
  }
  EXPECT_TRUE(torch::equal(sum, rows));
  EXPECT_TRUE(torch::equal(torch::cat(gradients), whole.grad()));
}

TEST(Quantised, CopiesHaveCodesOfTheirOwn) {
  TokenEmbedding token(TokenOptions(9, 64)), clipped(TokenOptions(9, 64).max_norm(1.0));
  token->quantize("int8", 4);
  EXPECT_TRUE(token->parameters().empty());
  const auto copy = std::dynamic_pointer_cast<posembed::TokenEmbeddingImpl>(token->clone());
  EXPECT_TRUE(torch::equal(copy->forward(token_ids()), token->forward(token_ids())));
  EXPECT_NE(copy->table->rows.codes.data_ptr(), token->table->rows.codes.data_ptr());
  EXPECT_THROW(token->quantize(), c10::ValueError);
  EXPECT_THROW(token->logits(torch::ones({64})), c10::TypeError);
  EXPECT_THROW(token->resize(12), c10::TypeError);
  EXPECT_THROW(clipped->quantize(), c10::ValueError);
}

TEST(Quantised, BagsSumRowsOfCodesInFloat32) {
  const auto rows = posembed::functional::quantize_rows(torch::randn({9, 8}), "int4", 4);
  const torch::Tensor numbers = posembed::functional::embedding(torch::arange(9), rows, 1.0, torch::kFloat);
  const auto call = posembed::BagCall().padding_idx(1).mode(posembed::BagMode::mean);
  const torch::Tensor expected = posembed::functional::token_bag(token_ids(), numbers, call);
  EXPECT_TRUE(torch::equal(posembed::functional::token_bag(token_ids(), rows, call), expected));
  EXPECT_TRUE(torch::equal(posembed::functional::token_bag(token_ids(), rows, call, torch::kBFloat16),
                           expected.to(torch::kBFloat16)));
}

/// A file with a table "t" of float32 numbers.
std::string safetensors_of(const torch::Tensor& weight) {
  const std::string path = testing::TempDir() + "posembed_file_table.safetensors";
  std::string header = R"({"t":{"dtype":"F32","shape":[)" + std::to_string(weight.size(0)) + "," +
                       std::to_string(weight.size(1)) + R"(],"data_offsets":[0,)" + std::to_string(weight.nbytes()) +
                       "]}}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const uint64_t length = header.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), sizeof length);
  file << header;
  file.write(static_cast<const char*>(weight.const_data_ptr()), static_cast<std::streamsize>(weight.nbytes()));
  return path;
}

TEST(FileTable, ReadsRowsAndRefusesAShorterFile) {
  const torch::Tensor weight = torch::randn({90, 16}), ids = torch::tensor({{89, 0}, {3, 3}});
  const std::string path = safetensors_of(weight);
  const posembed::FileRows rows(path);
  EXPECT_EQ(rows.num_embeddings(), 90);
  EXPECT_EQ(rows.bytes_in_files(), 90 * 16 * 4);
  EXPECT_EQ(rows.bytes_in_memory(), 0);
  rows.prefetch(ids);
  posembed::FileTable table(rows, torch::kFloat);
  torch::Tensor next = ids.clone();
  posembed::RowsAhead first = table->prefetch(next, 2.0), second = table->prefetch(ids + 0);
  next.zero_();  // each handle has the ids of its call
  EXPECT_TRUE(torch::equal(second.take(), weight.index({ids})));
  EXPECT_TRUE(torch::equal(first.take(), 2 * weight.index({ids})));
  EXPECT_THROW(first.take(), c10::Error);
  EXPECT_TRUE(torch::equal(table->forward(ids, 2.0), 2 * weight.index({ids})));
  table->to(torch::kBFloat16);
  EXPECT_TRUE(torch::equal(table->forward(ids), weight.index({ids}).to(torch::kBFloat16)));
  EXPECT_THROW(rows.prefetch(torch::tensor({90})), c10::IndexError);
  EXPECT_THROW(rows.codes(), c10::TypeError);
  const posembed::FileRows shorter = rows.split(4).value();
  EXPECT_EQ(shorter.num_embeddings(), 360);
  EXPECT_TRUE(
      torch::equal(posembed::functional::embedding(4 * ids + 1, shorter), weight.index({ids}).narrow(-1, 4, 4)));
  EXPECT_THROW(rows.split(3), c10::ValueError);
  EXPECT_THROW(posembed::FileRows(path, {"t", "u"}), c10::ValueError);
  std::filesystem::resize_file(path, 200);
  EXPECT_THROW(table->forward(ids), posembed::pretrained::FileFormatError);
}

TEST(Mapped, IsTheTableItselfOnTheCpu) {
  const torch::Tensor table = torch::randn({9, 4});
  EXPECT_EQ(posembed::mapped(table, torch::kCPU).data_ptr(), table.data_ptr());
  EXPECT_THROW(posembed::mapped(table.t(), torch::kCPU), c10::ValueError);
  EXPECT_THROW(posembed::mapped(table, torch::kMeta), c10::ValueError);
}

}  // namespace
