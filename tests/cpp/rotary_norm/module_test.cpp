// Tests the QK-norm functions as C++ programs use them.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <optional>

#include "posembed/rotary_norm.h"
#include "posembed/rotary_tables.h"

namespace {

using posembed::NormRotaryCall;
using posembed::RotarySpec;
using posembed::functional::norm_rotary;

torch::Tensor norm(const torch::Tensor& x, const torch::Tensor& weight, double offset) {
  return x * (x.pow(2).mean(-1, true) + 1e-6).rsqrt() * (weight + offset);
}

TEST(RotaryNormModule, NormsThenRotates) {
  const RotarySpec spec(8);
  const auto options = torch::dtype(torch::kFloat64);
  const torch::Tensor query = torch::randn({2, 5, 4, 8}, options);
  const torch::Tensor key = torch::randn({2, 5, 1, 8}, options);
  const torch::Tensor weights = torch::randn({2, 8}, options);
  const auto call = NormRotaryCall().weight_offset(1.0);
  const auto [first, second] = norm_rotary(query, key, weights[0], weights[1], spec, call);
  const auto [expected_query, expected_key] =
      posembed::functional::rotary(norm(query, weights[0], 1.0), norm(key, weights[1], 1.0), spec);
  EXPECT_TRUE(torch::allclose(first, expected_query, 1e-12, 1e-13));
  EXPECT_TRUE(torch::allclose(second, expected_key, 1e-12, 1e-13));
  const auto [query_again, key_again] =
      posembed::functional::norm_rotary_(query, key, weights[0], weights[1], spec, call);
  EXPECT_TRUE(query_again.is_same(query));
  EXPECT_TRUE(key_again.is_same(key));
  EXPECT_TRUE(torch::equal(query, first));
  EXPECT_TRUE(torch::equal(key, second));
}

TEST(RotaryNormModule, NormsQueryAndKeyOfAProjection) {
  const RotarySpec spec(8);
  const auto options = torch::dtype(torch::kFloat64);
  const torch::Tensor weights = torch::randn({2, 8}, options).requires_grad_();
  const torch::Tensor qkv = torch::randn({2, 5, 64}, options).requires_grad_();
  const auto packing = posembed::Packing(4).key_heads(2).order(posembed::PackedOrder::groups);
  const auto call = NormRotaryCall().offset(torch::tensor({3, 9}));
  const auto [query, key, value] =
      posembed::functional::norm_rotary_packed(qkv, packing, weights[0], weights[1], spec, call);
  const auto groups = qkv.unflatten(-1, {2, 4, 8}).split_with_sizes({2, 1, 1}, -2);
  const auto [expected_query, expected_key] =
      norm_rotary(groups[0].flatten(2, 3), groups[1].flatten(2, 3), weights[0], weights[1], spec, call);
  EXPECT_TRUE(torch::equal(query, expected_query));
  EXPECT_TRUE(torch::equal(key, expected_key));
  EXPECT_TRUE(value.is_alias_of(qkv));
  const auto gradients = [&](const torch::Tensor& a, const torch::Tensor& b, const torch::Tensor& c) {
    return torch::autograd::grad({(a.sin().sum() + b.cos().sum() + c.square().sum())}, {qkv, weights});
  };
  const auto found = gradients(query, key, value);
  const auto wanted = gradients(expected_query, expected_key, groups[2].flatten(2, 3));
  for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(torch::allclose(found[i], wanted[i], 1e-10, 1e-12));
  const torch::NoGradGuard inference;
  const torch::Tensor written = qkv.clone();
  EXPECT_TRUE(
      posembed::functional::norm_rotary_packed_(written, packing, weights[0], weights[1], spec, call).is_same(written));
  EXPECT_TRUE(torch::equal(written.unflatten(-1, {2, 4, 8}).narrow(3, 0, 2).flatten(2, 3), query));
}

TEST(RotaryNormModule, AQueryAloneOverAllHeads) {
  const RotarySpec spec(8);
  const auto options = torch::dtype(torch::kFloat64);
  const torch::Tensor query = torch::randn({2, 5, 4, 8}, options);
  const torch::Tensor weight = torch::randn({32}, options), bias = torch::randn({32}, options);
  const torch::Tensor normed = torch::layer_norm(query.flatten(-2), {32}, weight, bias, 1e-6);
  const torch::Tensor expected = posembed::functional::rotary(normed.unflatten(-1, {4, 8}).contiguous(), spec);
  const auto call = NormRotaryCall().centred(true).all_heads(true).query_bias(bias);
  EXPECT_TRUE(torch::allclose(norm_rotary(query, weight, spec, call), expected, 1e-12, 1e-13));
  const torch::Tensor same = posembed::functional::norm_rotary_(query, weight, spec, call);
  EXPECT_TRUE(same.is_same(query));
  EXPECT_TRUE(torch::allclose(query, expected, 1e-12, 1e-13));
}

TEST(RotaryNormModule, EachDocumentBeginsAtItsOwnPosition) {
  const torch::Tensor query = torch::randn({1, 5, 4, 8}), weight = torch::randn({8});
  const auto call = NormRotaryCall().cu_seqlens(torch::tensor({0, 2, 5}));
  const torch::Tensor found =
      norm_rotary(query, weight, RotarySpec(8), NormRotaryCall(call).offset(torch::tensor({7, 4})));
  const torch::Tensor positions = torch::tensor({7, 8, 4, 5, 6});
  EXPECT_TRUE(torch::equal(found, norm_rotary(query, weight, RotarySpec(8), NormRotaryCall(positions))));
  EXPECT_THROW(norm_rotary(query, weight, RotarySpec(8), NormRotaryCall(call).positions(positions)), c10::ValueError);
}

TEST(RotaryNormModule, ByTables) {
  const auto options = torch::dtype(torch::kFloat64);
  const torch::Tensor query = torch::randn({2, 5, 4, 8}, options);
  const torch::Tensor cos = torch::randn({5, 4}, options), sin = torch::randn({5, 4}, options);
  const torch::Tensor expected = posembed::functional::rotary_tables(
      norm(query, torch::ones({8}, options), 0.0),
      posembed::RotaryTables(cos, sin).half_width(true).layout(posembed::Layout::bshd));
  const auto call = NormRotaryCall().cos(cos).sin(sin);
  const torch::Tensor found = norm_rotary(query, std::nullopt, RotarySpec(8), call);
  EXPECT_TRUE(torch::allclose(found, expected, 1e-12, 1e-13));
}

}  // namespace
