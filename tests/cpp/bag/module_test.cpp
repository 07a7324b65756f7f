// Tests TokenBag as C++ programs use it: copies, given tables, errors.
#include <gtest/gtest.h>

#include "posembed/bag.h"

namespace {

using posembed::TokenBag;
using posembed::TokenBagOptions;
using torch::Tensor;

Tensor bag_ids() { return torch::tensor({1, 2, 1, 0, 4, 1}); }

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
