/// Learned positions: a table with a trained row for each position, added to the token there.
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
#include "posembed/offset.h"

namespace posembed {

namespace functional {

/// x plus rows of a table; gradients flow to both.
/// @param x  floating [batch, seq, embedding_dim]
/// @param weight  [first_row + max_positions, embedding_dim], in the dtype of x
/// @param call  positions int32 or int64
/// @param first_row  the row of position 0
/// @throws c10::ValueError shapes and options; c10::TypeError dtypes; c10::IndexError a position
///     without a row
POSEMBED_API torch::Tensor learned_add(const torch::Tensor& x, const torch::Tensor& weight,
                                       const PositionCall& call = {}, int64_t first_row = 0);

/// Looks up the rows of positions: int32/int64 [...] -> [..., embedding_dim]; otherwise like
/// learned_add().
POSEMBED_API torch::Tensor learned_encode(const torch::Tensor& weight,
                                          const torch::Tensor& positions, int64_t first_row = 0);

/// Returns a longer table [first_row + max_positions, embedding_dim]; see
/// LearnedPositionalEmbeddingImpl::extend.
POSEMBED_API torch::Tensor learned_extend(const torch::Tensor& weight, int64_t max_positions,
                                          int64_t first_row = 0,
                                          const std::string& method = "linear");

/// Positions as RoBERTa counts them, for a table with first_row = padding_idx + 1: 0, 1, … for
/// tokens, and -1 for padding, which is the row before position 0.
/// @param ids  int32/int64 [..., seq]
/// @param past_length  tokens in a cache
/// @return int64, in the shape of ids
/// @throws c10::ValueError a past_length below 0; c10::TypeError dtypes
POSEMBED_API torch::Tensor roberta_positions(const torch::Tensor& ids, int64_t padding_idx,
                                             int64_t past_length = 0);

/// Positions as OPT counts them, for a table with first_row = 2: a mask marks padding.
/// @param attention_mask  bool, int32 or int64 [..., past_length + seq], 0 for padding; covers the
///     cached tokens and the new ones
/// @return int64 [..., seq]: positions of the new tokens
POSEMBED_API torch::Tensor opt_positions(const torch::Tensor& attention_mask,
                                         int64_t past_length = 0);

/// Positions as fairseq counts them: those of roberta_positions() without a cache.
POSEMBED_API torch::Tensor fairseq_positions(const torch::Tensor& ids, int64_t padding_idx);

}  // namespace functional

/// Options of LearnedPositionalEmbedding.
struct POSEMBED_API LearnedOptions {
  LearnedOptions(int64_t max_positions, int64_t embedding_dim)
      : max_positions_(max_positions), embedding_dim_(embedding_dim) {}

  /// The table has rows for positions 0 to max_positions - 1.
  TORCH_ARG(int64_t, max_positions);
  /// Components of a row.
  TORCH_ARG(int64_t, embedding_dim);
  /// The row of position 0: 2 for OPT, padding_idx + 1 for RoBERTa. The rows before it belong to
  /// negative positions.
  TORCH_ARG(int64_t, first_row) = 0;
};

/// A table of position vectors; `weight` is [first_row + max_positions, embedding_dim], initialised
/// from N(0, 0.02) as in BERT and GPT-2.
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

  /// x [batch, seq, embedding_dim] plus the rows of its positions.
  /// @param call  positions int32 or int64
  /// @throws c10::ValueError shapes and options; c10::TypeError dtypes; c10::IndexError a position
  ///     without a row
  torch::Tensor forward(const torch::Tensor& x, const PositionCall& call = {});
  /// Looks up the rows without adding them: int32/int64 [...] -> [..., embedding_dim].
  torch::Tensor encode(const torch::Tensor& positions);

  /// Makes the table longer, in place. Rows before position 0 do not change. Create the optimizer
  /// afterwards, because its state is not resized.
  /// @param method  "linear" or "cubic": interpolation that keeps the first and the last row.
  ///     "repeat": repeats the rows, starting with the first.
  /// @throws c10::ValueError fewer positions than the table has; an unknown method
  void extend(int64_t max_positions, const std::string& method = "linear");

  LearnedOptions options;
  torch::Tensor weight;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(PositionCall())})
};

TORCH_MODULE(LearnedPositionalEmbedding);

}  // namespace posembed
