/// Logits of a query and a table of relative positions: query[q] · table[row of q and k], added to
/// attention scores. Shaw et al., "Self-Attention with Relative Position Representations",
/// arXiv:1803.02155; Dai et al., "Transformer-XL", arXiv:1901.02860; He et al., "DeBERTa",
/// arXiv:2006.03654; Kirillov et al., "Segment Anything", arXiv:2304.02643.
#pragma once

#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "posembed/alibi.h"
#include "posembed/export.h"
#include "posembed/relative_bias.h"

namespace posembed {

/// Options of RelativeLogits.
struct POSEMBED_API RelativeLogitsOptions {
  RelativeLogitsOptions(std::vector<int64_t> num_buckets, int64_t head_dim)
      : num_buckets_(std::move(num_buckets)), head_dim_(head_dim) {}
  RelativeLogitsOptions(int64_t num_buckets, int64_t head_dim)
      : RelativeLogitsOptions(std::vector<int64_t>{num_buckets}, head_dim) {}

  /// Rows of the table of each axis; the tables follow one another. Of a grid, the numbers of
  /// differences of each axis, whose product is the number of rows.
  TORCH_ARG(std::vector<int64_t>, num_buckets);
  /// Columns of the table.
  TORCH_ARG(int64_t, head_dim);
  /// 0: heads share a table.
  TORCH_ARG(int64_t, num_heads) = 0;
  /// How distances map to rows.
  TORCH_ARG(RelativeBuckets, buckets) = RelativeBuckets::clipped;
  /// t5 and deberta: longer distances share a row.
  TORCH_ARG(int64_t, max_distance) = 128;
  /// Keys after the query have their own rows.
  TORCH_ARG(bool, bidirectional) = true;
  /// Keys after the query are hidden.
  TORCH_ARG(bool, causal) = false;
  /// Whether the table multiplies keys, as in DeBERTa's second term.
  TORCH_ARG(bool, by_key) = false;
  /// Multiplies the logits.
  TORCH_ARG(double, scale) = 1.0;
};

namespace functional {

/// The row of each query and key.
/// @param like  a tensor on the device of the result
/// @param options  num_buckets, buckets, max_distance, bidirectional and causal
/// @param call  positions, documents and mask; with several axes, query_positions and key_positions
///     are [axes, length] or [axes, batch, length]
/// @return int64 [query_length, key_length], with a batch [batch, query_length, key_length], with
///     several axes [axes, batch or 1, query_length, key_length]. -1: no row; -2: a hidden key
/// @throws c10::ValueError shapes and options; c10::TypeError dtypes; c10::IndexError positions
POSEMBED_API torch::Tensor relative_rows(const torch::Tensor& like, int64_t query_length,
                                         int64_t key_length, const RelativeLogitsOptions& options,
                                         const ALiBiCall& call = {});

/// query[q] · table[row] * scale for each query and key, summed over axes; gradients flow to query,
/// table and scores. Products are torch's, for a block of queries at a time.
/// @param query  floating [batch, heads, queries, dim]; keys [batch, heads, keys, dim] by key
/// @param table  [rows, dim] or [heads, rows, dim], in the dtype of query
/// @param rows  int32/int64 as relative_rows() returns. -1: logit 0; -2: -infinity
/// @param scores  [batch, heads, queries, keys], to which the logits are added
/// @throws c10::ValueError shapes; c10::TypeError dtypes; c10::IndexError rows outside the table
POSEMBED_API torch::Tensor relative_logits(
    const torch::Tensor& query, const torch::Tensor& table, const torch::Tensor& rows,
    double scale = 1.0, bool by_key = false,
    const std::optional<torch::Tensor>& scores = std::nullopt);

/// Adds the logits to `scores` in place; returns `scores`. For inference: raises if a gradient
/// would be lost.
POSEMBED_API torch::Tensor relative_logits_(const torch::Tensor& scores, const torch::Tensor& query,
                                            const torch::Tensor& table, const torch::Tensor& rows,
                                            double scale = 1.0, bool by_key = false);

}  // namespace functional

/// A table of relative positions; `weight` is [rows, head_dim] or [num_heads, rows, head_dim],
/// initialised from N(0, 0.02).
///
///     posembed::RelativeLogits shaw(posembed::RelativeLogitsOptions(2 * 16 + 1, 64));
///     auto scores = shaw->forward(q, std::nullopt, {}, q.matmul(k.transpose(-1, -2)));
class POSEMBED_API RelativeLogitsImpl : public torch::nn::Cloneable<RelativeLogitsImpl> {
 public:
  explicit RelativeLogitsImpl(const RelativeLogitsOptions& options);

  void reset() override;
  /// N(0, 0.02).
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  /// The logits [batch, heads, queries, keys]; see functional::relative_logits.
  /// @param query  [batch, heads, queries, head_dim]; with by_key, the keys
  /// @param other_length  number of keys; with by_key, of queries; default: that of scores, or of
  ///     `query`
  /// @param call  positions, documents and mask
  torch::Tensor forward(const torch::Tensor& query,
                        std::optional<int64_t> other_length = std::nullopt,
                        const ALiBiCall& call = {},
                        const std::optional<torch::Tensor>& scores = std::nullopt);

  /// The same, added to `scores` in place.
  torch::Tensor add_(const torch::Tensor& scores, const torch::Tensor& query,
                     const ALiBiCall& call = {});

  /// The row of each query and key; see functional::relative_rows.
  torch::Tensor rows(int64_t query_length, int64_t key_length, const ALiBiCall& call = {}) const;

  /// Read at construction and by reset().
  RelativeLogitsOptions options;
  torch::Tensor weight;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(std::optional<int64_t>())},
                           {2, torch::nn::AnyValue(ALiBiCall())},
                           {3, torch::nn::AnyValue(std::optional<torch::Tensor>())})
};

TORCH_MODULE(RelativeLogits);

}  // namespace posembed
