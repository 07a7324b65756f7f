/// Relative position bias: a learned number for each head and bucket of distances, added to
/// attention scores. Raffel et al., "Exploring the Limits of Transfer Learning with a Unified
/// Text-to-Text Transformer" (T5), arXiv:1910.10683.
#pragma once

#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>

#include "posembed/export.h"

namespace posembed {

/// How distances between query and key map to buckets.
enum class RelativeBuckets {
  t5,    ///< one for each short distance, then logarithmically wider ones, up to max_distance
  bert,  ///< one for each distance; longer ones share the outermost (Shaw et al., arXiv:1803.02155)
};

/// "t5" or "bert".
POSEMBED_API const char* name(RelativeBuckets buckets);

/// Options of RelativePositionBias.
struct POSEMBED_API RelativeBiasOptions {
  /* implicit */ RelativeBiasOptions(int64_t num_heads) : num_heads_(num_heads) {}

  /// Columns of the table.
  TORCH_ARG(int64_t, num_heads);
  /// Rows of the table: even for t5 with both directions; odd, 2 * max_positions - 1, for bert.
  TORCH_ARG(int64_t, num_buckets) = 32;
  /// t5: longer distances share a bucket.
  TORCH_ARG(int64_t, max_distance) = 128;
  /// Keys after the query have their own buckets; otherwise they share the bucket of distance 0.
  TORCH_ARG(bool, bidirectional) = true;
  /// How distances map to buckets.
  TORCH_ARG(RelativeBuckets, buckets) = RelativeBuckets::t5;
};

namespace functional {

/// The bucket of each distance.
/// @param distances  int32/int64 [...]: position of the key minus that of the query
/// @return int64 [...], 0 to options.num_buckets() - 1
/// @throws c10::ValueError options that do not fit together; c10::TypeError dtypes
POSEMBED_API torch::Tensor relative_buckets(const torch::Tensor& distances,
                                            const RelativeBiasOptions& options);

/// The bias [num_heads, query_length, key_length]; gradients flow to `weight`.
/// @param weight  floating [num_buckets, num_heads]; sizes in `options` are ignored
/// @param query_offset  position of the first query among the keys; default: the last query is at
///     the last key
/// @throws c10::ValueError shapes and options; c10::TypeError dtypes
POSEMBED_API torch::Tensor relative_bias(const torch::Tensor& weight, int64_t query_length,
                                         int64_t key_length, const RelativeBiasOptions& options,
                                         std::optional<int64_t> query_offset = std::nullopt);

}  // namespace functional

/// A table of biases; `weight` is [num_buckets, num_heads], initialised from N(0, 0.02). T5 names
/// it relative_attention_bias.weight.
///
///     posembed::RelativePositionBias bias(posembed::RelativeBiasOptions(8));
///     auto y = at::scaled_dot_product_attention(q, k, v, bias->forward(q.size(2)));
class POSEMBED_API RelativePositionBiasImpl
    : public torch::nn::Cloneable<RelativePositionBiasImpl> {
 public:
  explicit RelativePositionBiasImpl(int64_t num_heads)
      : RelativePositionBiasImpl(RelativeBiasOptions(num_heads)) {}
  explicit RelativePositionBiasImpl(const RelativeBiasOptions& options);

  void reset() override;
  /// N(0, 0.02).
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  /// The bias [num_heads, query_length, key_length]; see functional::relative_bias.
  /// @param key_length  default: query_length
  torch::Tensor forward(int64_t query_length, std::optional<int64_t> key_length = std::nullopt,
                        std::optional<int64_t> query_offset = std::nullopt);

  /// Read at construction and by reset().
  RelativeBiasOptions options;
  torch::Tensor weight;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(std::optional<int64_t>())},
                           {2, torch::nn::AnyValue(std::optional<int64_t>())})
};

TORCH_MODULE(RelativePositionBias);

}  // namespace posembed
