// Tests rotation by given tables as C++ programs use it.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <tuple>

#include "posembed/rotary_tables.h"

namespace {

using posembed::RotaryTables;
using posembed::functional::rotary_tables;
using posembed::functional::rotary_tables_;
using posembed::functional::rotary_tables_out;

torch::Tensor rotate_half(const torch::Tensor& x) {
  const auto halves = x.chunk(2, -1);
  return torch::cat({-halves[1], halves[0]}, -1);
}

TEST(RotaryTables, HaveTheBitsOfTorchsExpression) {
  torch::manual_seed(0);
  for (const auto type : {torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kHalf}) {
    const torch::Tensor query = torch::randn({2, 4, 7, 16}).to(type);
    const torch::Tensor key = torch::randn({2, 2, 7, 16}).to(type);
    const torch::Tensor angles = torch::randn({2, 7, 8}).repeat({1, 1, 2});
    const torch::Tensor cos = angles.cos().to(type), sin = angles.sin().to(type);
    const auto eager = [&](const torch::Tensor& x) { return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1); };
    const auto [q, k] = rotary_tables(query, key, RotaryTables(cos, sin));
    EXPECT_TRUE(torch::equal(q, eager(query)));
    EXPECT_TRUE(torch::equal(k, eager(key)));
    const torch::Tensor out = torch::empty_like(query);
    rotary_tables_out(out, query, RotaryTables(cos, sin));
    EXPECT_TRUE(torch::equal(out, q));
    EXPECT_TRUE(torch::equal(rotary_tables_(query, RotaryTables(cos, sin)), q));
  }
}

TEST(RotaryTables, TakeComplexNumbersAndPassGradients) {
  torch::manual_seed(0);
  const torch::Tensor angles = torch::randn({5, 4});
  const torch::Tensor freqs = torch::polar(torch::ones({5, 4}), angles);
  const torch::Tensor query = torch::randn({5, 3, 10}).requires_grad_();
  const auto options = [](RotaryTables tables) {
    return tables.layout(posembed::Layout::thd).interleaved(true).start(2);
  };
  const torch::Tensor rotated = rotary_tables(query, options(RotaryTables(freqs)));
  const torch::Tensor same = rotary_tables(query, options(RotaryTables(angles.cos(), angles.sin())).half_width(true));
  EXPECT_TRUE(torch::allclose(rotated, same, 0, 1e-6));
  rotated.square().sum().backward();
  EXPECT_TRUE(torch::allclose(query.grad(), 2 * query, 0, 1e-5));
  EXPECT_THROW(rotary_tables(query, RotaryTables(freqs)), c10::ValueError);
}

}  // namespace
