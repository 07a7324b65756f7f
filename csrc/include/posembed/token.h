/// Token embedding: a table with one learned row for each id of a vocabulary.
/// What torch::nn::Embedding offers, with gradients that are accumulated in float32 whatever the
/// dtype and have the same bits for any number of threads.
#pragma once

#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "posembed/export.h"
#include "posembed/pretrained.h"

namespace torch::optim {
class Optimizer;
}

namespace posembed {

/// The form of a table's gradient.
enum class TableGradient {
  dense,  ///< a tensor like the table
  rows,   ///< a sparse tensor of the touched rows, each once, sorted by id
};

/// "dense" or "rows".
POSEMBED_API const char* name(TableGradient gradient);

namespace functional {

/// How embedding() reads its table and makes its gradient.
struct EmbeddingCall {
  int64_t padding_idx = -1;         ///< an id whose row gets no gradient; -1: none
  double scale = 1.0;               ///< multiplies the result
  bool scale_grad_by_freq = false;  ///< divide a row's gradient by its id's count among `ids`
  TableGradient gradient = TableGradient::dense;
  /// The id of the table's first row, where it holds a part of a vocabulary: ids of other parts
  /// give zeros and get no gradient. -1: the table is the whole vocabulary.
  int64_t vocabulary_start = -1;
};

/// scale * weight[ids]; gradients flow to weight.
/// @param ids  int32/int64 [...], each from 0 to num_embeddings - 1, or any with vocabulary_start
/// @param weight  floating [num_embeddings, embedding_dim]
/// @return [..., embedding_dim]
/// @throws c10::ValueError shapes and options; c10::TypeError dtypes; c10::IndexError ids
POSEMBED_API torch::Tensor embedding(const torch::Tensor& ids, const torch::Tensor& weight,
                                     const EmbeddingCall& call = {});

}  // namespace functional

/// Options of TokenEmbedding: those of torch::nn::Embedding, scale and gradient.
struct POSEMBED_API TokenOptions {
  TokenOptions(int64_t num_embeddings, int64_t embedding_dim)
      : num_embeddings_(num_embeddings), embedding_dim_(embedding_dim) {}

  /// Rows of the table.
  TORCH_ARG(int64_t, num_embeddings);
  /// Components of a row.
  TORCH_ARG(int64_t, embedding_dim);
  /// A row that starts as zeros and gets no gradient; negative: counted from the end.
  TORCH_ARG(std::optional<int64_t>, padding_idx) = std::nullopt;
  /// Looked-up rows whose norm is larger are first scaled down to it, in the table.
  TORCH_ARG(std::optional<double>, max_norm) = std::nullopt;
  /// The p of that norm.
  TORCH_ARG(double, norm_type) = 2.0;
  /// Divide a row's gradient by its id's count in the batch.
  TORCH_ARG(bool, scale_grad_by_freq) = false;
  /// The same as gradient(TableGradient::rows), in torch's words.
  TORCH_ARG(bool, sparse) = false;
  /// Multiplies every result.
  TORCH_ARG(double, scale) = 1.0;
  /// The form of weight.grad().
  TORCH_ARG(TableGradient, gradient) = TableGradient::dense;
  /// The table itself, instead of one filled with N(0, 1).
  TORCH_ARG(torch::Tensor, _weight) = torch::Tensor();

 public:
  /// Scale by the square root of embedding_dim, as the Transformer does.
  TokenOptions& sqrt_dim() { return scale(std::sqrt(static_cast<double>(embedding_dim_))); }
};

/// How TokenEmbedding::resize fills new rows.
struct POSEMBED_API ResizeOptions {
  /// "mean" of the old rows; "mean-and-covariance": drawn from the normal distribution with their
  /// mean and covariance_scale times their covariance; "normal": N(0, 1), as in the beginning.
  TORCH_ARG(std::string, initialization) = "mean";
  /// The new rows themselves, instead.
  TORCH_ARG(torch::Tensor, rows) = torch::Tensor();
  /// As transformers has it: new rows differ, and logits hardly do.
  TORCH_ARG(double, covariance_scale) = 1e-9;
  /// Draws new rows; none: torch's own.
  TORCH_ARG(std::optional<at::Generator>, generator) = std::nullopt;
};

/// A table of token vectors; `weight` is [num_embeddings, embedding_dim].
///
///     posembed::TokenEmbedding token(posembed::TokenOptions(30522, 768).padding_idx(0));
///     auto vectors = token->forward(ids);    // [batch, seq] -> [batch, seq, 768]
///     auto scores = token->logits(hidden);   // tied output head
class POSEMBED_API TokenEmbeddingImpl : public torch::nn::Cloneable<TokenEmbeddingImpl> {
 public:
  TokenEmbeddingImpl(int64_t num_embeddings, int64_t embedding_dim)
      : TokenEmbeddingImpl(TokenOptions(num_embeddings, embedding_dim)) {}
  explicit TokenEmbeddingImpl(TokenOptions options);

  void reset() override;
  /// N(0, 1), and zeros for padding_idx.
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  /// int32/int64 [...] -> [..., embedding_dim]; see functional::embedding for errors.
  torch::Tensor forward(const torch::Tensor& ids);
  /// [..., embedding_dim] -> [..., num_embeddings]: the table as output head.
  torch::Tensor logits(const torch::Tensor& hidden);

  /// Makes the vocabulary longer or shorter, in place; rows that stay keep their bits.
  /// @param optimizer  Adam, AdamW, SGD, Adagrad or RMSprop over the table: keeps what it knows of
  ///     rows that stay; new rows begin with zeros
  /// @throws c10::ValueError padding_idx would be cut off; options that do not fit
  void resize(int64_t num_embeddings, const ResizeOptions& how = {},
              torch::optim::Optimizer* optimizer = nullptr);

  /// Read at construction; padding_idx counted from the start.
  TokenOptions options;
  torch::Tensor weight;
};

class TokenEmbedding : public torch::nn::ModuleHolder<TokenEmbeddingImpl> {
 public:
  using torch::nn::ModuleHolder<TokenEmbeddingImpl>::ModuleHolder;

  /// A module over `weight` [num_embeddings, embedding_dim], which it shares. Sizes in `options`
  /// are ignored.
  static POSEMBED_API TokenEmbedding from_pretrained(const torch::Tensor& weight,
                                                     bool freeze = true,
                                                     TokenOptions options = {0, 0});

  /// A module over a table of a file that pretrained::open() takes: its rows for the words of
  /// `vocabulary`, in that order, or without one all its rows. Sizes in `options` are ignored.
  /// @throws pretrained::FileFormatError the file is broken; c10::ValueError options
  static POSEMBED_API TokenEmbedding from_file(
      const std::string& path,
      const std::optional<std::vector<std::string>>& vocabulary = std::nullopt,
      const pretrained::ReadOptions& read = {}, bool freeze = true, TokenOptions options = {0, 0});
};

}  // namespace posembed
