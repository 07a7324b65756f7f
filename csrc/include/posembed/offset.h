// The position of the first token of a sequence.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <torch/arg.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "posembed/export.h"

namespace posembed {

/// A number, or a tensor with one for each sample, for batched decoding with caches of different
/// lengths; beside cu_seqlens one for each document.
///
///     rope->forward(q, k, posembed::RotaryCall().offset(17));
///     rope->forward(q, k, posembed::RotaryCall().offset(torch::tensor({17, 4})));  // batch of 2
class POSEMBED_API Offset {
 public:
  /// One position for all samples or documents.
  /* implicit */ Offset(int64_t number = 0) : number_(number) {}
  /* implicit */ Offset(c10::SymInt number) : number_(std::move(number)) {}
  /// @param of_samples  int32/int64 [batch], or [documents] beside cu_seqlens
  /* implicit */ Offset(at::Tensor of_samples) : of_samples_(std::move(of_samples)) {}

  /// The number; 0 if each sample has its own.
  const c10::SymInt& number() const { return number_; }

  /// The tensor, if each sample or document has its own.
  const std::optional<at::Tensor>& of_samples() const { return of_samples_; }

  /// The given positions; if each sample has its own offset, [batch, seq] for the tokens of `x`;
  /// with documents, [seq], restarting in each.
  /// @param batch  index of the batch dimension of `x`; -1: none
  /// @param seq  index of the sequence dimension of `x`
  /// @param cu_seqlens  int32/int64 [documents + 1], where `x` has one sequence
  /// @throws c10::ValueError positions given together with a tensor, or a tensor that is not
  ///     [batch] or [documents]; c10::TypeError its dtype
  std::optional<at::Tensor> positions(
      const std::optional<at::Tensor>& given, const at::Tensor& x, int64_t batch = 0,
      int64_t seq = 1, const std::optional<at::Tensor>& cu_seqlens = std::nullopt) const;

 private:
  c10::SymInt number_ = 0;
  std::optional<at::Tensor> of_samples_;
};

/// The order of the dimensions of what positions are added to.
enum class AdditiveLayout {
  bsd,  ///< [batch, seq, embedding_dim]
  sbd,  ///< [seq, batch, embedding_dim], as torch::nn::Transformer has them
};

/// "bsd" or "sbd".
POSEMBED_API const char* name(AdditiveLayout layout);

/// Options of a call of LearnedPositionalEmbedding or SinusoidalPositionalEmbedding:
///
///     auto y = position->forward(x, posembed::PositionCall().offset(17));
///
/// A tensor of positions is also a PositionCall: position->forward(x, positions).
struct POSEMBED_API PositionCall {
  PositionCall() = default;
  /* implicit */ PositionCall(at::Tensor positions) : positions_(std::move(positions)) {}

  /// [seq] or [batch, seq]; default: offset, offset + 1, …
  TORCH_ARG(std::optional<at::Tensor>, positions) = std::nullopt;
  /// The position of the first token if no positions are given.
  TORCH_ARG(Offset, offset) = 0;
  /// Packed documents, with batch 1: int32/int64 [documents + 1], the token at which each begins,
  /// then the number of tokens. Positions restart at `offset` in each.
  TORCH_ARG(std::optional<at::Tensor>, cu_seqlens) = std::nullopt;
  /// The tokens are the cells of this grid, row by row: {rows, columns} or {frames, rows, columns}.
  /// A learned table is resampled to it; sinusoids of several axes take their positions from it.
  TORCH_ARG(std::vector<int64_t>, grid);
  /// Sinusoids of two axes: bool [batch, rows, columns], false for the padding of smaller pictures.
  TORCH_ARG(std::optional<at::Tensor>, mask) = std::nullopt;

 public:
  /// The call whose positions are [seq, batch], for x [seq, batch, embedding_dim] taken for [batch,
  /// seq, embedding_dim]; a grid stays.
  PositionCall sequence_first(const at::Tensor& x) const;
};

}  // namespace posembed
