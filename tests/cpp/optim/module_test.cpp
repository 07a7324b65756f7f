// Tests the optimizer's step as C++ programs use it.
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "posembed/optim.h"

namespace {

using posembed::RowStep;
using posembed::StepRounding;
using posembed::StepRule;
using posembed::functional::step_rows_;

TEST(StepRows, ChangesTheRowsOfIds) {
  torch::Tensor table = torch::ones({4, 2}).requires_grad_(), sums = torch::zeros({4});
  const torch::Tensor gradient = torch::full({2, 2}, 3.0);
  RowStep step(StepRule::rowwise_adagrad, 0.5);
  step.ids(torch::tensor({1, 3})).second(sums).eps(0.0);
  const torch::Tensor result = step_rows_(table, gradient, step);
  EXPECT_TRUE(result.is_same(table));
  EXPECT_TRUE(torch::equal(table.select(1, 0), torch::tensor({1.f, .5f, 1.f, .5f})));
  EXPECT_TRUE(torch::equal(sums, torch::tensor({0.f, 9.f, 0.f, 9.f})));
}

TEST(StepRows, KeepsTheRestOfAFloat) {
  torch::Tensor table = torch::ones({1, 8}, at::kBFloat16);
  torch::Tensor rest = torch::zeros({1, 8}, at::kShort);
  const torch::Tensor gradient = torch::ones({1, 8}, at::kBFloat16);
  RowStep step(StepRule::sgd, 0x1p-12);
  step.rounding(StepRounding::remainder).remainder(rest);
  for (int i = 0; i < 64; ++i) step_rows_(table, gradient, step);
  EXPECT_EQ(table.max().item<float>(), 1.f - 0x1p-6f);
}

TEST(StepRows, RefusesWhatDoesNotFit) {
  const torch::Tensor table = torch::ones({4, 2}), gradient = torch::ones({2, 2});
  RowStep step(StepRule::sgd, 0.5);
  EXPECT_THROW(step_rows_(table, gradient, step), c10::ValueError);
  EXPECT_THROW(step_rows_(table, gradient, step.ids(torch::tensor({3, 1}))), c10::ValueError);
  EXPECT_THROW(step_rows_(table, gradient, step.ids(torch::tensor({1, 4}))), c10::IndexError);
  EXPECT_THROW(step_rows_(table, gradient, step.ids(torch::tensor({1, 3})).first_decay(0.5)), c10::ValueError);
  EXPECT_THROW(step_rows_(table.to(at::kHalf), gradient.to(at::kHalf), RowStep().ids(torch::tensor({1, 3}))),
               c10::TypeError);
  EXPECT_TRUE(torch::equal(table, torch::ones({4, 2})));
}

}  // namespace
