/// Rotation by given tables of cosines and sines, for models that compute them: the function that
/// transformers calls apply_rotary_pos_emb. Su et al., "RoFormer: Enhanced Transformer with Rotary
/// Position Embedding", arXiv:2104.09864.
#pragma once

#include <torch/arg.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>

#include "posembed/export.h"
#include "posembed/rotary.h"

namespace posembed {

/// The tables and options of rotary_tables().
///
///     auto [q, k] = posembed::functional::rotary_tables(
///         query, key, posembed::RotaryTables(cos, sin).interleaved(true));
struct POSEMBED_API RotaryTables {
  RotaryTables() = default;
  /// Floating [batch or 1, seq, width] or [seq, width] (layout thd: [tokens, width]), of one dtype;
  /// or [batch or 1, seq, heads, width] in any layout, where query and key have as many heads. The
  /// width is rotary_dim, or with half_width rotary_dim / 2.
  RotaryTables(torch::Tensor cos, torch::Tensor sin) : cos_(std::move(cos)), sin_(std::move(sin)) {}
  /// Complex freqs_cis of half width: cos + i sin.
  explicit RotaryTables(torch::Tensor freqs_cis) : cos_(std::move(freqs_cis)) {}

  TORCH_ARG(torch::Tensor, cos);
  TORCH_ARG(std::optional<torch::Tensor>, sin) = std::nullopt;
  /// The order of the dimensions of query and key.
  TORCH_ARG(Layout, layout) = Layout::bhsd;
  /// Pairs (2i, 2i + 1); otherwise (i, i + rotary_dim / 2).
  TORCH_ARG(bool, interleaved) = false;
  /// Tables have a column for each pair. Full-width tables have one for each component. Those of a
  /// pair (i and i + rotary_dim / 2, or 2i and 2i + 1 if interleaved) are usually equal; otherwise
  /// each component is turned by its own.
  TORCH_ARG(bool, half_width) = false;
  /// The first rotated component.
  TORCH_ARG(int64_t, start) = 0;
  /// float32: the bits of PyTorch's expression, query * cos + rotate_half(query) * sin in the dtype
  /// to which query and tables promote, or the complex product in float32. float32_product: float32
  /// throughout, rounded once to the dtype of query.
  TORCH_ARG(Numerics, numerics) = Numerics::float32;
};

namespace functional {

/// Rotates `query` by the tables; gradients flow to it and to the tables.
/// @param query  floating, in `tables.layout()`; components that are not rotated are copied
/// @throws c10::ValueError shapes and options; c10::TypeError dtypes
POSEMBED_API torch::Tensor rotary_tables(const torch::Tensor& query, const RotaryTables& tables);

/// Rotates `query` and `key` (any number of heads each) in one launch.
POSEMBED_API std::tuple<torch::Tensor, torch::Tensor> rotary_tables(const torch::Tensor& query,
                                                                    const torch::Tensor& key,
                                                                    const RotaryTables& tables);

/// rotary_tables() in place, for inference; returns its tensors.
/// @throws c10::ValueError also if grad mode is on and an argument requires grad, or
///     tensors overlap
POSEMBED_API torch::Tensor rotary_tables_(const torch::Tensor& query, const RotaryTables& tables);
POSEMBED_API std::tuple<torch::Tensor, torch::Tensor> rotary_tables_(const torch::Tensor& query,
                                                                     const torch::Tensor& key,
                                                                     const RotaryTables& tables);

/// rotary_tables() into `out`, for inference. `out` has the result's dtype and a contiguous last
/// dimension; it may be the input itself.
/// @throws as rotary_tables_()
POSEMBED_API torch::Tensor rotary_tables_out(const torch::Tensor& out, const torch::Tensor& query,
                                             const RotaryTables& tables);
POSEMBED_API std::tuple<torch::Tensor, torch::Tensor> rotary_tables_out(
    const torch::Tensor& query_out, const torch::Tensor& key_out, const torch::Tensor& query,
    const torch::Tensor& key, const RotaryTables& tables);

}  // namespace functional
}  // namespace posembed
