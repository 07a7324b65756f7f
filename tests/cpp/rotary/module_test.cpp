// Tests RotaryEmbedding as C++ programs use it: options, gradients, copies, printed form, errors.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <string>
#include <vector>

#include "posembed/rotary.h"

namespace {

using posembed::Layout;
using posembed::RotaryCall;
using posembed::RotaryEmbedding;
using posembed::RotaryOptions;
using posembed::RotarySpec;

TEST(RotaryModule, IsCalledAndMadeOfASpecification) {
  RotarySpec spec(8);
  spec.base = 500.0;
  RotaryEmbedding rope(spec);
  EXPECT_EQ(rope->options.base(), 500.0);
  const torch::Tensor query = torch::randn({1, 3, 2, 8}), key = query.narrow(2, 0, 1);
  EXPECT_TRUE(torch::equal(rope(query), rope->forward(query)));
  const auto [rotated, rotated_key] = rope(query, key, RotaryCall().offset(5));
  EXPECT_TRUE(torch::equal(rotated, rope(query, RotaryCall().offset(5))));
  EXPECT_TRUE(torch::equal(rotated_key, rotated.narrow(2, 0, 1)));
}

TEST(RotaryModule, PackedProjections) {
  using posembed::PackedOrder;
  using posembed::Packing;
  const RotarySpec spec(8);
  RotaryEmbedding rope(RotaryOptions(spec).layout(Layout::bhsd));
  const torch::Tensor qkv = torch::randn({2, 3, 8 * 8}, torch::requires_grad());
  for (const PackedOrder order : {PackedOrder::blocks, PackedOrder::groups}) {
    const Packing packing = Packing(4).key_heads(2).order(order);
    const bool blocks = order == PackedOrder::blocks;
    // [batch, heads, seq, head_dim]; groups have two query heads, a key and a value
    const torch::Tensor heads = qkv.view({2, 3, 8, 8}).transpose(1, 2);
    const auto of = [&](const std::vector<int64_t>& places) { return heads.index_select(1, torch::tensor(places)); };
    const torch::Tensor query = blocks ? of({0, 1, 2, 3}) : of({0, 1, 4, 5});
    const torch::Tensor key = blocks ? of({4, 5}) : of({2, 6});
    const torch::Tensor value = blocks ? of({6, 7}) : of({3, 7});
    const torch::Tensor offsets = torch::tensor({3, 9}, torch::kLong);
    const RotaryCall call = RotaryCall().offset(offsets);
    const auto [query_wanted, key_wanted] = rope->forward(query, key, call);
    const auto [query_found, key_found, value_found] = rope->rotate_packed(qkv, packing, call);
    EXPECT_TRUE(torch::equal(query_found, query_wanted));
    EXPECT_TRUE(torch::equal(key_found, key_wanted));
    EXPECT_TRUE(torch::equal(value_found, value));
    EXPECT_TRUE(value_found.is_alias_of(qkv));
    EXPECT_EQ(query_found.grad_fn(), value_found.grad_fn());
    const auto gradient = [&](const torch::Tensor& a, const torch::Tensor& b, const torch::Tensor& c) {
      const torch::Tensor total = a.sin().sum() + b.cos().sum() + c.exp().sum();
      return torch::autograd::grad({total}, {qkv})[0];
    };
    EXPECT_TRUE(torch::equal(gradient(query_found, key_found, value_found), gradient(query_wanted, key_wanted, value)));
    const torch::Tensor written = qkv.detach().clone(), again = qkv.detach().clone();
    EXPECT_TRUE(rope->rotate_packed_(written, packing, call).is_same(written));
    const auto options = RotaryCall(call).layout(Layout::bhsd);
    posembed::functional::rotary_packed_(again, packing, spec, options);
    EXPECT_TRUE(torch::equal(written, again));
    EXPECT_TRUE(
        torch::equal(std::get<0>(posembed::functional::rotary_packed(qkv, packing, spec, options)), query_wanted));
  }
  EXPECT_THROW(rope->rotate_packed(qkv, 4), c10::ValueError);
  EXPECT_THROW(rope->rotate_packed_(qkv, Packing(4).key_heads(2)), c10::ValueError);
}

TEST(RotaryModule, IntoGivenMemory) {
  const RotarySpec spec(8);
  const torch::Tensor query = torch::randn({2, 3, 4, 8}), key = torch::randn({2, 3, 1, 8});
  const auto [query_wanted, key_wanted] = posembed::functional::rotary(query, key, spec);
  const torch::Tensor packed = torch::zeros({2, 3, 6, 8});
  const torch::Tensor query_out = packed.narrow(2, 0, 4), key_out = packed.narrow(2, 4, 1);
  const auto [query_back, key_back] = posembed::functional::rotary_out(query_out, key_out, query, key, spec);
  EXPECT_TRUE(torch::equal(query_out, query_wanted));
  EXPECT_TRUE(torch::equal(key_out, key_wanted));
  EXPECT_TRUE(query_back.is_same(query_out));
  EXPECT_TRUE(key_back.is_same(key_out));
  query_out.zero_();
  EXPECT_TRUE(posembed::functional::rotary_out(query_out, query, spec).is_same(query_out));
  EXPECT_TRUE(torch::equal(query_out, query_wanted));
  EXPECT_THROW(posembed::functional::rotary_out(packed.narrow(2, 1, 4), query_out, spec), c10::ValueError);
}

TEST(RotaryModule, CastsLeaveLearnedFrequenciesAlone) {
  torch::nn::ModuleList model;
  RotaryEmbedding rope(RotaryOptions(8).base(300.0).learned_frequencies(true));
  model->push_back(rope);
  model->push_back(torch::nn::Linear(8, 8));
  const torch::Tensor before = rope->frequencies.detach().clone();
  model->to(torch::kBFloat16);
  model->to(torch::kCPU, torch::kHalf);
  EXPECT_EQ(model->parameters().back().scalar_type(), torch::kHalf);
  EXPECT_EQ(rope->frequencies.scalar_type(), torch::kFloat);
  EXPECT_TRUE(torch::equal(rope->frequencies, before));
  model->to(torch::kDouble);
  EXPECT_EQ(rope->frequencies.scalar_type(), torch::kDouble);
}

TEST(RotaryModule, EachSampleHasItsLength) {
  RotarySpec spec(8);
  posembed::LongRopeScaling scaling;
  scaling.factor = 4;
  scaling.original_max_positions = 10;
  scaling.short_factor = {1, 1, 1, 1};
  scaling.long_factor = {1, 2, 3, 4};
  spec.scaling = scaling;
  const torch::Tensor lengths = torch::tensor({10, 11, 3});
  for (const Layout layout : {Layout::bshd, Layout::sbhd}) {
    RotaryEmbedding rope(RotaryOptions(spec).layout(layout));
    const int64_t batch = layout == Layout::bshd ? 0 : 1;
    const torch::Tensor query = torch::randn({3, 3, 2, 8}), key = torch::randn({3, 3, 1, 8});
    const torch::Tensor offset = torch::tensor({1, 2, 3});
    const auto call = RotaryCall().seq_len(lengths).offset(offset);
    const auto [rotated, rotated_key] = rope->forward(query, key, call);
    EXPECT_TRUE(torch::equal(rope->forward(query, call), rotated));
    for (int64_t sample = 0; sample < 3; ++sample) {
      RotaryEmbedding own = rope->resolve(lengths[sample].item<int64_t>());
      const auto at_offset = RotaryCall().offset(offset[sample].item<int64_t>());
      const auto of = [&](const torch::Tensor& all) { return all.narrow(batch, sample, 1); };
      EXPECT_TRUE(torch::equal(of(rotated), own->forward(of(query), at_offset)));
      EXPECT_TRUE(torch::equal(of(rotated_key), own->forward(of(key), at_offset)));
    }
    EXPECT_THROW(rope->rotate_(query, RotaryCall().seq_len(lengths)), c10::ValueError);
    EXPECT_THROW(rope->forward(query, RotaryCall().seq_len(lengths.slice(0, 1))), c10::ValueError);
    EXPECT_THROW(rope->forward(query, RotaryCall().seq_len(lengths.to(torch::kFloat))), c10::TypeError);
    EXPECT_THROW(rope->forward(query, RotaryCall().seq_len(lengths).offset(1)), c10::ValueError);
  }
  EXPECT_THROW(RotaryEmbedding(RotarySpec(8))->forward(torch::randn({3, 3, 2, 8}), RotaryCall().seq_len(lengths)),
               c10::ValueError);
  spec.scaling = posembed::DynamicNtkScaling{2.0, 10};
  EXPECT_THROW(RotaryEmbedding(spec)->forward(torch::randn({3, 3, 2, 8}), RotaryCall().seq_len(lengths)),
               c10::ValueError);
}

/// The first line of what `call` throws.
template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    return text.substr(0, text.find('\n'));
  }
  return "nothing";
}

TEST(RotaryModule, RefusesOptionsThatItHasItself) {
  const torch::Tensor query = torch::randn({1, 3, 2, 8});
  EXPECT_THROW(RotaryEmbedding(8)->forward(query, torch::Tensor(), {}), c10::TypeError);
  for (const Layout own : {Layout::bshd, Layout::bhsd}) {
    RotaryEmbedding rope(RotaryOptions(8).layout(own));
    EXPECT_TRUE(torch::equal(rope(query, RotaryCall().layout(own)), rope(query)));
    for (const Layout other : {Layout::bshd, Layout::bhsd, Layout::sbhd}) {
      if (other == own) continue;
      EXPECT_EQ(error_of([&] { rope(query, query, RotaryCall().layout(other)); }),
                std::string("layout: expected the module's, ") + name(own) + ", got " + name(other));
    }
    const RotaryCall call = RotaryCall().frequencies(torch::ones({4}));
    EXPECT_EQ(error_of([&] { rope->rotate_(query, call); }).rfind("frequencies: expected none", 0), 0U);
  }
}

}  // namespace
