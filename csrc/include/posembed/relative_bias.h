/// Relative position bias: a learned number for each head and bucket of distances, added to
/// attention scores. Raffel et al., "Exploring the Limits of Transfer Learning with a Unified
/// Text-to-Text Transformer" (T5), arXiv:1910.10683. For windows in two dimensions: Liu et al.,
/// "Swin Transformer", arXiv:2103.14030.
#pragma once

#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "posembed/alibi.h"
#include "posembed/export.h"
#include "posembed/learned.h"

namespace posembed {

/// How distances between query and key map to buckets.
enum class RelativeBuckets {
  t5,       ///< one for each short distance, then logarithmically wider ones, up to max_distance
  bert,     ///< one for each distance, query minus key; longer ones share the outermost
  clipped,  ///< the same, key minus query (Shaw et al., arXiv:1803.02155)
  deberta,  ///< query minus key: one for each distance up to num_buckets / 4, then logarithmically
            ///< wider ones (He et al., arXiv:2006.03654)
  band,     ///< as bert, but longer distances have no bucket: -1
  grid,     ///< as bert; relative_rows() numbers the differences of all axes row by row
};

/// "t5", "bert", "clipped", "deberta", "band" or "grid".
POSEMBED_API const char* name(RelativeBuckets buckets);

/// How an MLP computes the table of a window.
enum class RelativeMlp {
  swin,  ///< 16 sigmoid(mlp), of logarithms that a window scales (SwinV2, arXiv:2111.09883)
  cr,    ///< the MLP itself, with a bias in both layers, of ln(|d| + 1) (timm's Swin V2 Cr)
};

/// "swin" or "cr".
POSEMBED_API const char* name(RelativeMlp rule);

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
  /// {rows, columns} of a window in two dimensions, or {frames, rows, columns}. Its buckets are the
  /// differences of rows and columns, (2 rows - 1)(2 columns - 1), and the options above do not
  /// apply.
  TORCH_ARG(std::vector<int64_t>, window);
  /// A token stands before the window's cells, as in BEiT: three more rows, for the scores from it,
  /// to it and with itself.
  TORCH_ARG(bool, class_token) = false;
  /// How forward() and extend() resample the table to another window.
  TORCH_ARG(Resampling, resampling) = Resampling().method("bilinear");
  /// Hidden components of SwinV2's MLP, whose output replaces the table; 0: a table.
  TORCH_ARG(int64_t, mlp_dim) = 0;
  /// What the MLP computes.
  TORCH_ARG(RelativeMlp, mlp_rule) = RelativeMlp::swin;
  /// With SwinV2's MLP: the window whose largest differences are the MLP's largest inputs; default:
  /// the window of the call.
  TORCH_ARG(std::vector<int64_t>, pretrained_window);
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

/// The bias of a window in two or three dimensions, [num_heads, tokens, tokens], tokens row by row
/// after a class token; gradients flow to `weight`.
/// @param weight  floating [(2 rows - 1)(2 columns - 1), num_heads], and 3 rows for a class token
/// @param window  {rows, columns} or {frames, rows, columns}
/// @throws c10::ValueError shapes; c10::TypeError dtypes
POSEMBED_API torch::Tensor relative_window_bias(const torch::Tensor& weight,
                                                const std::vector<int64_t>& window,
                                                bool class_token = false);

/// The table of a window resampled to that of another one, with rows of a class token unchanged.
POSEMBED_API torch::Tensor relative_window_resample(
    const torch::Tensor& weight, const std::vector<int64_t>& window,
    const std::vector<int64_t>& new_window,
    const Resampling& how = Resampling().method("bilinear"));

}  // namespace functional

/// A table of biases; `weight` is [num_buckets, num_heads], initialised from N(0, 0.02). T5 names
/// it relative_attention_bias.weight.
///
///     posembed::RelativePositionBias bias(posembed::RelativeBiasOptions(8));
///     auto y = at::scaled_dot_product_attention(q, k, v, bias->forward(q.size(2)));
///
/// Of a window: `weight` is Swin's relative_position_bias_table. With mlp_dim(512), `mlp` is
/// SwinV2's continuous_position_bias_mlp instead.
///
///     posembed::RelativePositionBias swin(posembed::RelativeBiasOptions(8).window({7, 7}));
///     auto b = swin->of_window();  // [8, 49, 49]
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

  /// The bias at the positions of a call, with documents and mask: [num_heads, queries, keys], or
  /// [batch, num_heads, queries, keys] where they have a batch. Hidden keys get -infinity.
  torch::Tensor of_positions(int64_t query_length, std::optional<int64_t> key_length,
                             const ALiBiCall& call);

  /// The bias of a window in two dimensions, [num_heads, tokens, tokens].
  /// @param window  default: its own; another one resamples the table or evaluates the MLP
  torch::Tensor of_window(const std::vector<int64_t>& window = {});
  /// The table of a window, [(2 rows - 1)(2 columns - 1), num_heads], and the class token's rows.
  torch::Tensor table(const std::vector<int64_t>& window = {});
  /// Makes another window its own, in place. Create the optimizer afterwards.
  void extend(const std::vector<int64_t>& window);

  /// Read at construction and by reset().
  RelativeBiasOptions options;
  torch::Tensor weight;                ///< undefined with an MLP
  torch::nn::Sequential mlp{nullptr};  ///< [2] -> [num_heads]; only with mlp_dim

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(std::optional<int64_t>())},
                           {2, torch::nn::AnyValue(std::optional<int64_t>())})
};

TORCH_MODULE(RelativePositionBias);

}  // namespace posembed
