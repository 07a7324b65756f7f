/// QK-norm and rotary position embedding in one launch: RMSNorm or LayerNorm of query and key, by
/// head or over all heads, then the rotation. Henry et al., "Query-Key Normalization for
/// Transformers", arXiv:2010.04245; with RMSNorm in Qwen 3, Gemma 3 and others.
#pragma once

#include <torch/arg.h>
#include <torch/types.h>

#include <optional>
#include <tuple>
#include <utility>

#include "posembed/export.h"
#include "posembed/rotary.h"

namespace posembed {

/// Norms of query and key before a rotation, for rotary_cache_(); see NormRotaryCall.
struct POSEMBED_API QueryKeyNorm {
  TORCH_ARG(std::optional<torch::Tensor>, query_weight) = std::nullopt;
  TORCH_ARG(std::optional<torch::Tensor>, key_weight) = std::nullopt;
  TORCH_ARG(double, eps) = 1e-6;
  TORCH_ARG(double, weight_offset) = 0.0;
  TORCH_ARG(bool, centred) = false;
  TORCH_ARG(bool, all_heads) = false;
  TORCH_ARG(std::optional<torch::Tensor>, query_bias) = std::nullopt;
  TORCH_ARG(std::optional<torch::Tensor>, key_bias) = std::nullopt;
};

/// Options of norm_rotary() and norm_rotary_().
struct POSEMBED_API NormRotaryCall {
  NormRotaryCall() = default;
  /* implicit */ NormRotaryCall(torch::Tensor positions) : positions_(std::move(positions)) {}

  /// As in RotaryCall; a token at -1 is normalised but not rotated.
  TORCH_ARG(std::optional<torch::Tensor>, positions) = std::nullopt;
  /// The position of the first token if no positions are given.
  TORCH_ARG(Offset, offset) = 0;
  /// As in RotaryCall.
  TORCH_ARG(std::optional<torch::Tensor>, cu_seqlens) = std::nullopt;
  /// The order of the dimensions.
  TORCH_ARG(Layout, layout) = Layout::bshd;
  /// Added to the mean square, or to the variance.
  TORCH_ARG(double, eps) = 1e-6;
  /// Added to the weights: 1 for Gemma.
  TORCH_ARG(double, weight_offset) = 0.0;
  /// LayerNorm, which subtracts the mean, instead of RMSNorm.
  TORCH_ARG(bool, centred) = false;
  /// One norm over all heads of a token (OLMo 2, Wan); weights and biases are [heads * head_dim].
  TORCH_ARG(bool, all_heads) = false;
  /// LayerNorm's biases, like the weights.
  TORCH_ARG(std::optional<torch::Tensor>, query_bias) = std::nullopt;
  TORCH_ARG(std::optional<torch::Tensor>, key_bias) = std::nullopt;
  /// Tables to rotate by instead of exact angles, as in RotaryTables: [batch or 1, seq, width] or
  /// [seq, width], where the width is rotary_dim or rotary_dim / 2; a complex cos needs no sin. Of
  /// `spec`, only head_dim, rotary_dim, rotary_start and interleaved count.
  TORCH_ARG(std::optional<torch::Tensor>, cos) = std::nullopt;
  TORCH_ARG(std::optional<torch::Tensor>, sin) = std::nullopt;
  /// With tables. float32: the steps of a PyTorch program, each rounded to the dtype of query; the
  /// products are rounded too if the tables have that dtype. float32_product: one rounding.
  TORCH_ARG(Numerics, numerics) = Numerics::float32;
  /// With tables and float32: rows are rounded before the weights multiply them (Llama, Qwen 3) and
  /// after it, or only after it (Gemma, OLMo 2, torch's rms_norm and layer_norm).
  TORCH_ARG(bool, round_before_weight) = true;
};

namespace functional {

/// Normalises `query` and `key`, then rotates them; gradients flow to both, to weights, biases and
/// tables.
///
///     auto [q, k] =
///         posembed::functional::norm_rotary(query, key, query_weight, key_weight, spec,
///         positions);
///
/// @param query  floating, in `call.layout()`: [batch, seq, heads, head_dim]
/// @param key  like query, with any number of heads
/// @param query_weight  [head_dim], in the dtype of query or in float32; std::nullopt: ones
/// @param key_weight  like query_weight
/// @throws c10::ValueError shapes and options; c10::TypeError dtypes; c10::IndexError positions
POSEMBED_API std::tuple<torch::Tensor, torch::Tensor> norm_rotary(
    const torch::Tensor& query, const torch::Tensor& key,
    const std::optional<torch::Tensor>& query_weight,
    const std::optional<torch::Tensor>& key_weight, const RotarySpec& spec,
    const NormRotaryCall& call = {});

/// The same for a query alone.
POSEMBED_API torch::Tensor norm_rotary(const torch::Tensor& query,
                                       const std::optional<torch::Tensor>& query_weight,
                                       const RotarySpec& spec, const NormRotaryCall& call = {});

/// norm_rotary() in place; returns query and key, which may be parts of one packed tensor. For
/// inference: raises if a gradient would be lost.
POSEMBED_API std::tuple<torch::Tensor, torch::Tensor> norm_rotary_(
    const torch::Tensor& query, const torch::Tensor& key,
    const std::optional<torch::Tensor>& query_weight,
    const std::optional<torch::Tensor>& key_weight, const RotarySpec& spec,
    const NormRotaryCall& call = {});
POSEMBED_API torch::Tensor norm_rotary_(const torch::Tensor& query,
                                        const std::optional<torch::Tensor>& query_weight,
                                        const RotarySpec& spec, const NormRotaryCall& call = {});

/// Normalises and rotates query and key of a packed projection into new tensors; the value is a
/// view of it. One gradient flows to it, into which those of query and key are written. Calls with
/// LayerNorm, `all_heads` or tables take the way of separate tensors.
///
///     auto [query, key, value] = posembed::functional::norm_rotary_packed(
///         qkv, posembed::Packing(32).key_heads(8), query_weight, key_weight, spec);
///
/// @param qkv  as in rotary_packed()
/// @throws as norm_rotary()
POSEMBED_API std::tuple<torch::Tensor, torch::Tensor, torch::Tensor> norm_rotary_packed(
    const torch::Tensor& qkv, const Packing& packing,
    const std::optional<torch::Tensor>& query_weight,
    const std::optional<torch::Tensor>& key_weight, const RotarySpec& spec,
    const NormRotaryCall& call = {});

/// norm_rotary_packed() in place; returns `qkv`. For inference: raises if a gradient would be lost.
POSEMBED_API torch::Tensor norm_rotary_packed_(const torch::Tensor& qkv, const Packing& packing,
                                               const std::optional<torch::Tensor>& query_weight,
                                               const std::optional<torch::Tensor>& key_weight,
                                               const RotarySpec& spec,
                                               const NormRotaryCall& call = {});

}  // namespace functional
}  // namespace posembed
