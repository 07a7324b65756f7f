/// Rotary position embedding with a paged key-value cache: rotates query and key and writes key and
/// value to the cache, in one launch. For inference. Pages as in Kwon et al., "Efficient Memory
/// Management for Large Language Model Serving with PagedAttention", arXiv:2309.06180.
#pragma once

#include <torch/arg.h>
#include <torch/types.h>

#include <optional>
#include <tuple>
#include <utility>
#include <variant>

#include "posembed/export.h"
#include "posembed/rotary.h"
#include "posembed/rotary_norm.h"

namespace posembed {

/// The order of the dimensions of a paged cache.
enum class CacheLayout {
  nhd,  ///< [pages, page_size, heads, head_dim]
  hnd,  ///< [pages, heads, page_size, head_dim]
};

/// "nhd" or "hnd".
POSEMBED_API const char* name(CacheLayout layout);

/// The divisor of rows before conversion to float8_e4m3fn: a number, or a float32 tensor with one
/// element on the data's device, which is read without a host synchronisation.
using CacheScale = std::variant<double, torch::Tensor>;

/// Options of rotary_cache_().
struct POSEMBED_API RotaryCacheCall {
  RotaryCacheCall() = default;
  /* implicit */ RotaryCacheCall(torch::Tensor positions) : positions_(std::move(positions)) {}

  /// As in RotaryCall.
  TORCH_ARG(std::optional<torch::Tensor>, positions) = std::nullopt;
  /// The position of the first token if no positions are given.
  TORCH_ARG(Offset, offset) = 0;
  TORCH_ARG(std::optional<torch::Tensor>, cu_seqlens) = std::nullopt;
  /// The order of the dimensions of query, key and value.
  TORCH_ARG(Layout, layout) = Layout::thd;
  TORCH_ARG(CacheLayout, cache_layout) = CacheLayout::nhd;
  /// Also rotate the key in place, for attention that reads it from `key`.
  TORCH_ARG(bool, rotate_key) = false;
  /// Where the rotated query goes; default: in place.
  TORCH_ARG(std::optional<torch::Tensor>, query_out) = std::nullopt;
  TORCH_ARG(CacheScale, key_scale) = 1.0;
  TORCH_ARG(CacheScale, value_scale) = 1.0;
  /// Normalises query and key before the rotation.
  TORCH_ARG(std::optional<QueryKeyNorm>, norm) = std::nullopt;
};

/// Options of mla_rotary_cache_(); see RotaryCacheCall.
struct POSEMBED_API MlaRotaryCacheCall {
  MlaRotaryCacheCall() = default;
  /* implicit */ MlaRotaryCacheCall(torch::Tensor positions) : positions_(std::move(positions)) {}

  TORCH_ARG(std::optional<torch::Tensor>, positions) = std::nullopt;
  TORCH_ARG(Offset, offset) = 0;
  TORCH_ARG(std::optional<torch::Tensor>, cu_seqlens) = std::nullopt;
  TORCH_ARG(Layout, layout) = Layout::thd;
  TORCH_ARG(std::optional<torch::Tensor>, query_out) = std::nullopt;
  TORCH_ARG(CacheScale, scale) = 1.0;
};

namespace functional {

/// Rotates `query` in place; rotates `key` and writes it and `value` to the slots of the caches.
/// Returns the rotated query.
///
///     posembed::functional::rotary_cache_(query, key, value, key_cache, value_cache, slots,
///                                         spec, positions);
///
/// @param query  floating, in `call.layout()`: [tokens, heads, head_dim]
/// @param key  like query, with any number of heads
/// @param value  like key, with any head_dim
/// @param key_cache  in `call.cache_layout()`, any strides with a contiguous last dimension; in the
///     dtype of the data, or in float8_e4m3fn, which stores key / scale, computed in float32,
///     rounded to nearest even and saturated at 448
/// @param value_cache  like key_cache, with the head_dim of value
/// @param slot_mapping  int32/int64 [tokens] ([batch, seq] in other layouts), no slot twice:
///     page * page_size + index in the page; a token with -1 is not written
/// @throws c10::ValueError shapes and options; c10::TypeError dtypes; c10::IndexError positions and
///     slots
POSEMBED_API torch::Tensor rotary_cache_(const torch::Tensor& query, const torch::Tensor& key,
                                         const torch::Tensor& value, const torch::Tensor& key_cache,
                                         const torch::Tensor& value_cache,
                                         const torch::Tensor& slot_mapping, const RotarySpec& spec,
                                         const RotaryCacheCall& call = {});

/// For multi-head latent attention: rotates the rotary window of `query`, and the rotary part of
/// the key, which all heads share. DeepSeek-AI, "DeepSeek-V2", arXiv:2405.04434. Gradients flow to
/// both.
/// @param query  in `call.layout()`: [batch, seq, heads, head_dim]
/// @param key_rope  rotary_dim components: [batch, seq, 1, rotary_dim] or [batch, seq, rotary_dim]
/// @param call  without frequencies
POSEMBED_API std::tuple<torch::Tensor, torch::Tensor> mla_rotary(const torch::Tensor& query,
                                                                 const torch::Tensor& key_rope,
                                                                 const RotarySpec& spec,
                                                                 const RotaryCall& call = {});

/// mla_rotary() with the query in place; writes [latent, rotated key_rope] to the slots of the
/// cache. Returns the rotated query.
/// @param latent  the compressed keys and values: [tokens, latent_dim] or [tokens, 1, latent_dim]
/// @param key_rope  [tokens, rotary_dim] or [tokens, 1, rotary_dim]; not changed
/// @param cache  [pages, page_size, latent_dim + rotary_dim]; dtypes as in rotary_cache_()
/// @param slot_mapping  as in rotary_cache_()
POSEMBED_API torch::Tensor mla_rotary_cache_(
    const torch::Tensor& query, const torch::Tensor& latent, const torch::Tensor& key_rope,
    const torch::Tensor& cache, const torch::Tensor& slot_mapping, const RotarySpec& spec,
    const MlaRotaryCacheCall& call = {});

}  // namespace functional
}  // namespace posembed
