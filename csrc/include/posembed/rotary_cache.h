/// Rotary position embedding and paged key-value caches: query and key are rotated, key and value
/// written to the cache, in one launch. For inference.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <variant>

#include "posembed/export.h"
#include "posembed/rotary.h"

namespace posembed {

/// Which dimension is which in a paged cache.
enum class CacheLayout {
  nhd,  ///< [pages, page_size, heads, head_dim]
  hnd,  ///< [pages, heads, page_size, head_dim]
};

/// "nhd" or "hnd".
POSEMBED_API const char* name(CacheLayout layout);

namespace functional {

/// What rows are divided by before they become float8_e4m3fn: a number, or a float32 tensor of one
/// element on the data's device, which no host has to wait for.
using CacheScale = std::variant<double, torch::Tensor>;

/// How rotary_cache_() reads its arguments.
struct RotaryCacheCall {
  Layout layout = Layout::thd;  ///< of query, key and value
  CacheLayout cache_layout = CacheLayout::nhd;
  int64_t offset = 0;       ///< position of the first token where no positions are given
  bool rotate_key = false;  ///< the key in place also, for attention that reads it there
  std::optional<torch::Tensor> query_out = std::nullopt;  ///< instead of the query in place
  CacheScale key_scale = 1.0;
  CacheScale value_scale = 1.0;
};

/// Rotates `query` in place; rotates `key` and writes it and `value` to the slots of the caches.
///
///     posembed::functional::rotary_cache_(query, key, value, key_cache, value_cache, slots,
///                                         positions, spec.to_json());
///
/// @param query  floating, in `call.layout`: [tokens, heads, head_dim]
/// @param key  the same with any number of heads
/// @param value  the key's heads, any head_dim
/// @param key_cache  in `call.cache_layout`, any strides with a contiguous last dimension; the
///     data's dtype, or float8_e4m3fn: key / scale in float32, rounded to nearest even, beyond 448
///     saturated
/// @param slot_mapping  int32/int64 [tokens] ([batch, seq] in other layouts): page * page_size +
///     place, each slot once; -1 keeps a token out of the cache
/// @throws c10::ValueError shapes and options; c10::TypeError dtypes; c10::IndexError positions and
///     slots
POSEMBED_API void rotary_cache_(const torch::Tensor& query, const torch::Tensor& key,
                                const torch::Tensor& value, const torch::Tensor& key_cache,
                                const torch::Tensor& value_cache, const torch::Tensor& slot_mapping,
                                const std::optional<torch::Tensor>& positions,
                                const std::string& spec, const RotaryCacheCall& call = {});

/// Multi-head latent attention: rotates the window of `query` that `spec` names, and the key's
/// rotated part, which all heads share. DeepSeek-AI, "DeepSeek-V2", arXiv:2405.04434.
/// @param query  [batch, seq, heads, head_dim] in `call.layout`
/// @param key_rope  the same with one head, or without the dimension of heads; rotary_dim
/// components
POSEMBED_API std::tuple<torch::Tensor, torch::Tensor> mla_rotary(
    const torch::Tensor& query, const torch::Tensor& key_rope,
    const std::optional<torch::Tensor>& positions, const std::string& spec,
    const RotaryCall& call = {});

/// How mla_rotary_cache_() reads its arguments.
struct MlaRotaryCacheCall {
  Layout layout = Layout::thd;
  int64_t offset = 0;
  std::optional<torch::Tensor> query_out = std::nullopt;
  CacheScale scale = 1.0;
};

/// The same in place, and [latent, rotated key_rope] written to the slots of the cache.
/// @param latent  what was compressed of keys and values, [tokens, latent_dim], or with one head
/// @param cache  [pages, page_size, latent_dim + rotary_dim]
POSEMBED_API void mla_rotary_cache_(const torch::Tensor& query, const torch::Tensor& latent,
                                    const torch::Tensor& key_rope, const torch::Tensor& cache,
                                    const torch::Tensor& slot_mapping,
                                    const std::optional<torch::Tensor>& positions,
                                    const std::string& spec, const MlaRotaryCacheCall& call = {});

}  // namespace functional
}  // namespace posembed
