// Tests TokenBag as C++ programs use it: copies, given tables, errors.
#include <gtest/gtest.h>

#include "posembed/bag.h"

namespace {

using posembed::TokenBag;
using posembed::TokenBagOptions;
using torch::Tensor;

TEST(BagModule, FromPretrainedSharesAndFreezes) {
  const Tensor table = torch::randn({4, 2});
  TokenBag bag = TokenBag::from_pretrained(table);
  EXPECT_EQ(bag->weight.data_ptr(), table.data_ptr());
  EXPECT_FALSE(bag->weight.requires_grad());
  EXPECT_THROW(TokenBag::from_pretrained(torch::zeros({3})), c10::ValueError);
  EXPECT_THROW(TokenBag(TokenBagOptions(4, 3)._weight(table)), c10::ValueError);
}

}  // namespace
