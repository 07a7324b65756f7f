// Tests TokenBag as C++ programs use it: copies, given tables, errors.
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/serialize.h>

#include <sstream>

#include "posembed/bag.h"

namespace {

using posembed::BagMode;
using posembed::TokenBag;
using posembed::TokenBagImpl;
using posembed::TokenBagOptions;
using torch::Tensor;

Tensor bag_ids() { return torch::tensor({1, 2, 1, 0, 4, 1}); }
Tensor bag_offsets() { return torch::tensor({0, 3, 3}); }

TEST(BagModule, ClonesAndSaves) {
  TokenBag bag(TokenBagOptions(5, 8).mode(BagMode::mean).padding_idx(0));
  const auto copy = std::dynamic_pointer_cast<TokenBagImpl>(bag->clone());
  EXPECT_NE(copy->weight.data_ptr(), bag->weight.data_ptr());
  EXPECT_TRUE(torch::equal(copy->forward(bag_ids(), bag_offsets()), bag->forward(bag_ids(), bag_offsets())));
  std::stringstream file;
  torch::save(bag, file);
  TokenBag other(5, 8);
  torch::load(other, file);
  EXPECT_TRUE(torch::equal(other->weight, bag->weight));
}

TEST(BagModule, StandsInASequential) {
  TokenBag bag(5, 3);
  const torch::Tensor ids = torch::tensor({{1, 4}, {0, 0}}, torch::kLong);
  torch::nn::Sequential model(bag);
  EXPECT_TRUE(torch::equal(model->forward(ids), bag->forward(ids)));
}

TEST(BagModule, FromPretrainedSharesAndFreezes) {
  const Tensor table = torch::randn({4, 2});
  TokenBag bag = TokenBag::from_pretrained(table);
  EXPECT_EQ(bag->weight.data_ptr(), table.data_ptr());
  EXPECT_FALSE(bag->weight.requires_grad());
  EXPECT_THROW(TokenBag::from_pretrained(torch::zeros({3})), c10::ValueError);
}

TEST(BagModule, RefusesWhatDoesNotFit) {
  EXPECT_THROW(TokenBag(TokenBagOptions(5, 8).padding_idx(5)), c10::ValueError);
  EXPECT_THROW(TokenBag(-1, 8), c10::ValueError);
  EXPECT_THROW(TokenBag(TokenBagOptions(5, 8)._weight(torch::zeros({5, 7}))), c10::ValueError);
  TokenBag bag(5, 8);
  EXPECT_THROW(bag->forward(bag_ids()), c10::ValueError);
  EXPECT_THROW(bag->forward(bag_ids(), torch::tensor({1, 2})), c10::IndexError);
  try {
    bag->forward(torch::tensor({{0, 5}}));
    FAIL() << "id 5 was taken";
  } catch (const c10::IndexError& error) {
    EXPECT_NE(std::string(error.what()).find("token table of 5, got 5 at index 1"), std::string::npos) << error.what();
  }
}

}  // namespace
