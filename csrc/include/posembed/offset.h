// The position of the first token of a sequence.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "posembed/export.h"

namespace posembed {

/// A number, or a tensor with one for each sample: batched decoding with caches of unlike lengths.
///
///     position->forward(x, std::nullopt, 17);
///     position->forward(x, std::nullopt, torch::tensor({17, 4}));  // x [2, seq, dim]
class POSEMBED_API Offset {
 public:
  /// One position for all samples.
  /* implicit */ Offset(int64_t number = 0) : number_(number) {}
  /// @param of_samples  int32/int64 [batch]
  /* implicit */ Offset(at::Tensor of_samples) : of_samples_(std::move(of_samples)) {}

  /// The number; 0 if each sample has its own.
  int64_t number() const { return number_; }

  /// The tensor, if each sample has its own.
  const std::optional<at::Tensor>& of_samples() const { return of_samples_; }

  /// The given positions; if each sample has its own offset, [batch, seq] for the tokens of `x`.
  /// @param batch  dimension of x, -1: it has none
  /// @param seq  dimension of x
  /// @throws c10::ValueError positions beside a tensor, or a tensor that is not [batch];
  ///     c10::TypeError its dtype
  std::optional<at::Tensor> positions(const std::optional<at::Tensor>& given, const at::Tensor& x,
                                      int64_t batch = 0, int64_t seq = 1) const;

 private:
  int64_t number_ = 0;
  std::optional<at::Tensor> of_samples_;
};

}  // namespace posembed
