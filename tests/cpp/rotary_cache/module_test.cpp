// Tests the cache functions as C++ programs use them.
#include <gtest/gtest.h>

#include "posembed/rotary_cache.h"

namespace {

using posembed::RotaryCacheCall;
using posembed::RotaryCall;
using posembed::RotarySpec;

TEST(RotaryCacheModule, RotatesAndWritesPages) {
  const RotarySpec spec(8);
  const torch::Tensor query = torch::randn({3, 4, 8}), key = torch::randn({3, 2, 8});
  const torch::Tensor value = torch::randn({3, 2, 8}), slots = torch::tensor({5, -1, 2});
  const torch::Tensor key_cache = torch::zeros({2, 2, 4, 8}), value_cache = key_cache.clone();
  const auto [rotated_query, rotated_key] =
      posembed::functional::rotary(query, key, spec, RotaryCall().layout(posembed::Layout::thd).offset(7));
  const torch::Tensor written =
      posembed::functional::rotary_cache_(query, key, value, key_cache, value_cache, slots, spec,
                                          RotaryCacheCall().cache_layout(posembed::CacheLayout::hnd).offset(7));
  EXPECT_TRUE(written.is_same(query));
  EXPECT_TRUE(torch::equal(query, rotated_query));
  EXPECT_TRUE(torch::equal(key_cache.select(0, 1).select(1, 1), rotated_key[0]));
  EXPECT_TRUE(torch::equal(key_cache.select(0, 0).select(1, 2), rotated_key[2]));
  EXPECT_TRUE(torch::equal(value_cache.select(0, 1).select(1, 1), value[0]));
  EXPECT_EQ(value_cache.count_nonzero().item<int64_t>(), 32);
}

TEST(RotaryCacheModule, ScaleIsANumberOrATensor) {
  const RotarySpec spec(8);
  const torch::Tensor key = torch::randn({3, 2, 8}), slots = torch::arange(3);
  torch::Tensor caches[2];
  for (int i = 0; i < 2; ++i) {
    caches[i] = torch::zeros({1, 4, 2, 8}).to(torch::kFloat8_e4m3fn);
    const posembed::CacheScale scale =
        i == 0 ? posembed::CacheScale(0.25) : posembed::CacheScale(torch::tensor({0.25f}));
    posembed::functional::rotary_cache_(torch::randn({3, 4, 8}), key, key, caches[i], caches[i].clone(), slots, spec,
                                        RotaryCacheCall().key_scale(scale));
  }
  EXPECT_TRUE(torch::equal(caches[0].view(torch::kByte), caches[1].view(torch::kByte)));
  EXPECT_GT(caches[0].to(torch::kFloat).abs().max().item<float>(), 0.0f);
}

TEST(RotaryCacheModule, LatentAttention) {
  RotarySpec spec(24);
  spec.rotary_dim = 8;
  spec.rotary_start = 16;
  const torch::Tensor query = torch::randn({3, 4, 24}), key_rope = torch::randn({3, 8});
  const torch::Tensor latent = torch::randn({3, 32}), slots = torch::tensor({3, 1, 0});
  const torch::Tensor cache = torch::zeros({1, 4, 40});
  const auto [rotated_query, rotated_key] =
      posembed::functional::mla_rotary(query, key_rope, spec, RotaryCall().layout(posembed::Layout::thd));
  const torch::Tensor out = torch::zeros_like(query);
  const torch::Tensor written = posembed::functional::mla_rotary_cache_(query, latent, key_rope, cache, slots, spec,
                                                                        posembed::MlaRotaryCacheCall().query_out(out));
  EXPECT_TRUE(written.is_same(out));
  EXPECT_TRUE(torch::equal(written, rotated_query));
  EXPECT_TRUE(torch::equal(cache[0].index_select(0, slots), torch::cat({latent, rotated_key}, 1)));
}

TEST(RotaryCacheModule, EachDocumentBeginsAtItsOwnPosition) {
  const RotarySpec spec(8);
  const torch::Tensor tokens = torch::randn({5, 2, 8}), slots = torch::arange(5);
  const torch::Tensor bounds = torch::tensor({0, 2, 5}), offset = torch::tensor({7, 4});
  const torch::Tensor positions = torch::tensor({7, 8, 4, 5, 6});
  const auto run = [&](const RotaryCacheCall& call) {
    const torch::Tensor query = tokens.clone(), cache = torch::zeros({1, 8, 2, 8});
    posembed::functional::rotary_cache_(query, tokens, tokens, cache, cache.clone(), slots, spec, call);
    return torch::stack({query, cache[0].slice(0, 0, 5)});
  };
  EXPECT_TRUE(torch::equal(run(RotaryCacheCall().cu_seqlens(bounds).offset(offset)), run(RotaryCacheCall(positions))));
  EXPECT_TRUE(torch::equal(run(RotaryCacheCall().cu_seqlens(bounds).offset(3)),
                           run(RotaryCacheCall(torch::tensor({3, 4, 3, 4, 5})))));
  const auto latent = [&](const posembed::MlaRotaryCacheCall& call) {
    const torch::Tensor query = tokens.clone(), cache = torch::zeros({1, 8, 12});
    const torch::Tensor key = tokens.select(1, 0);
    posembed::functional::mla_rotary_cache_(query, key.slice(1, 0, 4), key, cache, slots, spec, call);
    return torch::cat({query.flatten(), cache.flatten()});
  };
  EXPECT_TRUE(torch::equal(latent(posembed::MlaRotaryCacheCall().cu_seqlens(bounds).offset(offset)),
                           latent(posembed::MlaRotaryCacheCall(positions))));
  const auto apart = [&](RotaryCall call) {
    call.layout(posembed::Layout::thd);
    return std::get<1>(posembed::functional::mla_rotary(tokens, tokens.select(1, 0), spec, call));
  };
  EXPECT_TRUE(torch::equal(apart(RotaryCall().cu_seqlens(bounds).offset(offset)), apart(RotaryCall(positions))));
}

}  // namespace
