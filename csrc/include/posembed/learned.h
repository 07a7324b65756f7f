/// Learned positions: a table with one learned row for each position, added to what stands there.
/// Gehring et al., "Convolutional Sequence to Sequence Learning", arXiv:1705.03122; BERT, GPT-2,
/// OPT, RoBERTa.
#pragma once

#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string>

#include "posembed/export.h"

namespace posembed {

namespace functional {

/// Positions of tokens among padding: 0, 1, … for tokens, -1 for padding, the row before position 0
/// of a table with first_row > 0. As RoBERTa counts (first_row = padding_idx + 1); `past_length`
/// tokens are in a cache.
/// @param ids  int32/int64 [..., seq]
/// @throws c10::ValueError a past_length below 0; c10::TypeError dtypes
POSEMBED_API torch::Tensor roberta_positions(const torch::Tensor& ids, int64_t padding_idx,
                                             int64_t past_length = 0);

/// The same from a mask, 0 where padding is, of the cached tokens and the new ones; positions of
/// the new ones. As OPT counts (first_row = 2).
/// @param attention_mask  bool, int32 or int64 [..., past_length + seq]
POSEMBED_API torch::Tensor opt_positions(const torch::Tensor& attention_mask,
                                         int64_t past_length = 0);

/// As fairseq counts (first_row = padding_idx + 1).
POSEMBED_API torch::Tensor fairseq_positions(const torch::Tensor& ids, int64_t padding_idx);

}  // namespace functional

/// Options of LearnedPositionalEmbedding.
struct POSEMBED_API LearnedOptions {
  LearnedOptions(int64_t max_positions, int64_t embedding_dim)
      : max_positions_(max_positions), embedding_dim_(embedding_dim) {}

  /// Positions 0 to max_positions - 1 have a row.
  TORCH_ARG(int64_t, max_positions);
  /// Components of a row.
  TORCH_ARG(int64_t, embedding_dim);
  /// The row of position 0: 2 for OPT, padding_idx + 1 for RoBERTa. Positions below 0 name the rows
  /// before.
  TORCH_ARG(int64_t, first_row) = 0;
};

/// A table of position vectors; `weight` is [first_row + max_positions, embedding_dim], filled with
/// N(0, 0.02) as BERT and GPT-2 do.
///
///     posembed::LearnedPositionalEmbedding position(posembed::LearnedOptions(512, 768));
///     auto h = position->forward(x);  // x [batch, seq, 768]
class POSEMBED_API LearnedPositionalEmbeddingImpl
    : public torch::nn::Cloneable<LearnedPositionalEmbeddingImpl> {
 public:
  LearnedPositionalEmbeddingImpl(int64_t max_positions, int64_t embedding_dim)
      : LearnedPositionalEmbeddingImpl(LearnedOptions(max_positions, embedding_dim)) {}
  explicit LearnedPositionalEmbeddingImpl(const LearnedOptions& options);

  void reset() override;
  /// N(0, 0.02).
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  /// x [batch, seq, embedding_dim] plus the rows of `positions`.
  /// @param positions  int32/int64 [seq] or [batch, seq]; none: offset, offset + 1, …
  /// @throws c10::ValueError shapes and options; c10::TypeError dtypes;
  ///         c10::IndexError a position past the end, which the text names
  torch::Tensor forward(const torch::Tensor& x,
                        const std::optional<torch::Tensor>& positions = std::nullopt,
                        int64_t offset = 0);
  /// The rows alone: int32/int64 [...] -> [..., embedding_dim].
  torch::Tensor encode(const torch::Tensor& positions);

  /// Makes the table longer, in place.
  /// @param method  "linear" or "cubic": rows are stretched, the first and the last stay. "repeat":
  ///     rows are repeated from the first on. Rows before position 0 stay.
  /// @throws c10::ValueError a max_positions below the present one; another method
  void extend(int64_t max_positions, const std::string& method = "linear");

  LearnedOptions options;
  torch::Tensor weight;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(std::optional<torch::Tensor>())},
                           {2, torch::nn::AnyValue(int64_t{0})})
};

TORCH_MODULE(LearnedPositionalEmbedding);

}  // namespace posembed
