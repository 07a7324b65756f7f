/// QK-norm and rotary position embedding in one launch: RMSNorm of each head of query and key with
/// a learned weight, then the rotation. Henry et al., "Query-Key Normalization for Transformers",
/// arXiv:2010.04245; with RMSNorm in Qwen 3, Gemma 3 and others.
#pragma once

#include <torch/arg.h>
#include <torch/types.h>

#include <optional>
#include <tuple>
#include <utility>

#include "posembed/export.h"
#include "posembed/rotary.h"

namespace posembed {

/// Options of norm_rotary() and norm_rotary_().
struct POSEMBED_API NormRotaryCall {
  NormRotaryCall() = default;
  /* implicit */ NormRotaryCall(torch::Tensor positions) : positions_(std::move(positions)) {}

  /// As in RotaryCall; a token at -1 is normalised but not rotated.
  TORCH_ARG(std::optional<torch::Tensor>, positions) = std::nullopt;
  /// The position of the first token if no positions are given.
  TORCH_ARG(Offset, offset) = 0;
  /// The order of the dimensions.
  TORCH_ARG(Layout, layout) = Layout::bshd;
  /// Added to the mean square.
  TORCH_ARG(double, eps) = 1e-6;
  /// Added to the weights: 1 for Gemma.
  TORCH_ARG(double, weight_offset) = 0.0;
};

namespace functional {

/// Normalises each head of `query` and `key`, then rotates it; gradients flow to both and to the
/// weights.
///
///     auto [q, k] =
///         posembed::functional::norm_rotary(query, key, query_weight, key_weight, spec,
///         positions);
///
/// @param query  floating, in `call.layout()`: [batch, seq, heads, head_dim]
/// @param key  like query, with any number of heads
/// @param query_weight  [head_dim], in the dtype of query
/// @param key_weight  like query_weight
/// @throws c10::ValueError shapes and options; c10::TypeError dtypes; c10::IndexError positions
POSEMBED_API std::tuple<torch::Tensor, torch::Tensor> norm_rotary(
    const torch::Tensor& query, const torch::Tensor& key, const torch::Tensor& query_weight,
    const torch::Tensor& key_weight, const RotarySpec& spec, const NormRotaryCall& call = {});

/// norm_rotary() in place; returns query and key. For inference: raises if a gradient would be
/// lost.
POSEMBED_API std::tuple<torch::Tensor, torch::Tensor> norm_rotary_(
    const torch::Tensor& query, const torch::Tensor& key, const torch::Tensor& query_weight,
    const torch::Tensor& key_weight, const RotarySpec& spec, const NormRotaryCall& call = {});

}  // namespace functional
}  // namespace posembed
