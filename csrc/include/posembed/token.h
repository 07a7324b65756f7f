/// Token embedding: a table with one learned row for each id of a vocabulary. Works like
/// torch::nn::Embedding. Gradients are summed in float32 or wider for every dtype of the table, and
/// their bits do not depend on the number of threads.
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
#include "posembed/given.h"
#include "posembed/pretrained.h"
#include "posembed/quantized.h"

namespace torch::optim {
class Optimizer;
}

namespace torch::nn {
class LinearImpl;
}

namespace posembed {

/// The form of a table's gradient.
enum class TableGradient {
  dense,  ///< a tensor like the table
  rows,   ///< a sparse tensor of the rows that were looked up, each once
};

/// The name of a form: "dense" or "rows".
POSEMBED_API const char* name(TableGradient gradient);

/// How functional::embedding() reads its table and makes its gradient.
struct POSEMBED_API EmbeddingCall {
  /// The id whose row gets no gradient.
  TORCH_ARG(std::optional<int64_t>, padding_idx) = std::nullopt;
  /// Multiplies the result.
  TORCH_ARG(double, scale) = 1.0;
  /// Divide a row's gradient by the count of its id in `ids`.
  TORCH_ARG(bool, scale_grad_by_freq) = false;
  /// The form of the table's gradient.
  TORCH_ARG(TableGradient, gradient) = TableGradient::dense;
  /// For a table that holds one slice of a vocabulary: the id of its first row. Ids outside the
  /// slice give zeros and no gradient. Default: the table is the whole vocabulary.
  TORCH_ARG(std::optional<int64_t>, vocabulary_start) = std::nullopt;
};

namespace functional {

/// scale * weight[ids]. Gradients flow to weight.
/// @param ids  int32 or int64 [...], from 0 to num_embeddings - 1 without vocabulary_start
/// @param weight  floating [num_embeddings, embedding_dim]
/// @return [..., embedding_dim]
/// @throws c10::ValueError for shapes and options, c10::TypeError for dtypes, c10::IndexError for
///     ids
POSEMBED_API torch::Tensor embedding(const torch::Tensor& ids, const torch::Tensor& weight,
                                     const EmbeddingCall& call = {});

/// scale * weight[ids], and rows of features in some places: those of images among tokens.
/// Gradients flow to weight and features.
/// @param features  [features, embedding_dim] in the dtype of weight; they are not scaled
/// @param places  bool, like ids: the places of the features, in order, as many as there are; or
///     int32/int64, like ids: the row of features for each id, or -1 for weight[id]. Ids in places
///     of features are not read.
/// @throws c10::ValueError also for another number of features than of places (c10::IndexError by a
///     later call on CUDA)
POSEMBED_API torch::Tensor embedding_with_features(const torch::Tensor& ids,
                                                   const torch::Tensor& weight,
                                                   const torch::Tensor& features,
                                                   const torch::Tensor& places,
                                                   const EmbeddingCall& call = {});

}  // namespace functional

/// Options of TokenEmbedding: those of torch::nn::Embedding, and scale and gradient.
struct POSEMBED_API TokenOptions {
  TokenOptions(int64_t num_embeddings, int64_t embedding_dim)
      : num_embeddings_(num_embeddings), embedding_dim_(embedding_dim) {}

  /// Rows of the table.
  TORCH_ARG(int64_t, num_embeddings);
  /// Components of a row.
  TORCH_ARG(int64_t, embedding_dim);
  /// The row that starts as zeros and gets no gradient; a negative one counts from the end.
  TORCH_ARG(std::optional<int64_t>, padding_idx) = std::nullopt;
  /// Before a lookup, rows with a larger norm are scaled down to it, in the table.
  TORCH_ARG(std::optional<double>, max_norm) = std::nullopt;
  /// The p of that norm.
  TORCH_ARG(double, norm_type) = 2.0;
  /// Divide a row's gradient by the count of its id in the batch.
  TORCH_ARG(bool, scale_grad_by_freq) = false;
  /// torch's name for gradient(TableGradient::rows).
  TORCH_ARG(bool, sparse) = false;
  /// The form of weight.grad().
  TORCH_ARG(Given<TableGradient>,
            gradient) = Given<TableGradient>::default_to(TableGradient::dense);
  /// The table to use; default: a new one, drawn from N(0, 1).
  TORCH_ARG(torch::Tensor, _weight) = torch::Tensor();

 public:
  /// Multiplies every result; default: 1.
  TokenOptions& scale(double scale) {
    scale_ = scale;
    return *this;
  }
  /// Scale by the square root of embedding_dim, as the Transformer does.
  TokenOptions& sqrt_dim() {
    scale_.reset();
    return *this;
  }
  double scale() const { return scale_.value_or(std::sqrt(static_cast<double>(embedding_dim_))); }

 private:
  std::optional<double> scale_ = 1.0;  // none: the square root of embedding_dim
};

/// What TokenEmbedding::resize fills new rows with.
enum class Initialization {
  mean,                 ///< the mean of the old rows
  mean_and_covariance,  ///< N(mean, covariance_scale * covariance) of the old rows
  normal,               ///< N(0, 1)
};

/// "mean", "mean-and-covariance" or "normal".
POSEMBED_API const char* name(Initialization initialization);

/// How TokenEmbedding::resize fills new rows.
struct POSEMBED_API ResizeOptions {
  TORCH_ARG(Initialization, initialization) = Initialization::mean;
  /// The new rows themselves; then initialization is not used.
  TORCH_ARG(torch::Tensor, rows) = torch::Tensor();
  /// The default is that of transformers: new rows differ from each other, but hardly change the
  /// logits.
  TORCH_ARG(double, covariance_scale) = 1e-9;
  /// Draws the new rows; default: torch's default generator.
  TORCH_ARG(std::optional<at::Generator>, generator) = std::nullopt;
  /// The number of rows is rounded up to a multiple of this one: 64 suits tensor cores.
  TORCH_ARG(int64_t, pad_to_multiple_of) = 1;
  /// The output layer of the vocabulary, `linear.ptr()`, which is resized too. Its new rows are
  /// initialised as the table's, or with the mean if `rows` are given. New biases are the mean.
  TORCH_ARG(std::shared_ptr<torch::nn::LinearImpl>, head) = nullptr;
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
  /// More numbers do not compile.
  template <typename... More>
  TokenEmbeddingImpl(int64_t num_embeddings, int64_t embedding_dim, int64_t, More...)
      : TokenEmbeddingImpl(num_embeddings, embedding_dim) {
    static_assert(sizeof...(More) > 99,
                  "TokenEmbedding takes num_embeddings and embedding_dim; the rest are options: "
                  "TokenOptions(1000, 64).padding_idx(0)");
  }

  void reset() override;
  /// Draws the table from N(0, 1) and sets the row of padding_idx to zeros.
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  /// ids [...] -> [..., embedding_dim]; see functional::embedding for dtypes and errors.
  torch::Tensor forward(const torch::Tensor& ids);
  /// hidden [..., embedding_dim] -> [..., num_embeddings]: the table as a tied output head.
  torch::Tensor logits(const torch::Tensor& hidden);

  /// As forward(), with features in some places; see functional::embedding_with_features.
  /// @param features  floating [features, embedding_dim]; under autocast of any dtype
  /// @param mask  bool, like ids
  torch::Tensor with_embeddings(const torch::Tensor& ids, const torch::Tensor& features,
                                const torch::Tensor& mask);

  /// Lengthens or shortens the vocabulary in place; remaining rows keep their bits.
  /// @param optimizer  Adam, AdamW, SGD, Adagrad or RMSprop over the table and the head: its state
  ///     is resized too, with zeros for new rows
  /// @throws c10::ValueError if padding_idx would be cut off or the options are inconsistent
  void resize(int64_t num_embeddings, const ResizeOptions& how = {},
              torch::optim::Optimizer* optimizer = nullptr);

  /// Keeps a part of the vocabulary in place: row i becomes the row rows[i]. padding_idx follows
  /// its row.
  /// @param rows  int32/int64 [num_embeddings], in any order
  /// @param head  the output layer of the vocabulary, which keeps the same rows
  /// @param optimizer  as for resize(): it keeps its state for those rows
  /// @throws c10::ValueError rows without padding_idx; c10::IndexError a row outside the table
  void select(const torch::Tensor& rows,
              const std::shared_ptr<torch::nn::LinearImpl>& head = nullptr,
              torch::optim::Optimizer* optimizer = nullptr);

  /// From now on only these rows learn: they are a parameter of their own, `trained`, so no
  /// optimizer changes another row, not by weight decay either. `weight` has the values that they
  /// had; train_rows(nullopt) puts the learned ones back and lets all rows learn.
  /// @param rows  int32/int64 [rows]; padding_idx never learns
  /// @param optimizer  as for resize(): it holds the table, and then `trained` instead
  /// @throws c10::ValueError a table with max_norm or scale_grad_by_freq
  /// @throws c10::IndexError a row outside the table
  void train_rows(const std::optional<torch::Tensor>& rows,
                  torch::optim::Optimizer* optimizer = nullptr);
  /// The same for all other rows: these do not learn.
  void freeze_rows(const torch::Tensor& rows, torch::optim::Optimizer* optimizer = nullptr);

  /// Replaces `weight` by `table`, its codes: afterwards the table is frozen, and smaller.
  /// See functional::quantize_rows.
  /// @throws c10::ValueError options that do not fit, or there is no `weight`
  void quantize(const std::string& format = "float8", int64_t block = 0);
  /// The bytes of the table.
  int64_t memory() const;

  /// Read at construction, which converts a negative padding_idx to an index from the start.
  TokenOptions options;
  torch::Tensor weight;
  /// The rows that learn and their ids, ascending; undefined unless train_rows() was called.
  torch::Tensor trained, trained_rows;
  /// Empty unless the table is quantised; `weight` is then undefined.
  QuantizedTable table{nullptr};

 private:
  void check_whole_table() const;
};

class TokenEmbedding : public torch::nn::ModuleHolder<TokenEmbeddingImpl> {
 public:
  using torch::nn::ModuleHolder<TokenEmbeddingImpl>::ModuleHolder;
  using Impl = TokenEmbeddingImpl;

  /// A module that shares `weight` [num_embeddings, embedding_dim]. The sizes in `options` are
  /// ignored.
  /// @throws c10::TypeError the weight has a dtype for storage only, such as float8
  static POSEMBED_API TokenEmbedding from_pretrained(const torch::Tensor& weight,
                                                     bool freeze = true,
                                                     TokenOptions options = {0, 0});

  /// A module with vectors of a file that pretrained::open() reads: those of the words of
  /// `vocabulary`, in that order, or all. The sizes in `options` are ignored. If `open` skips rows,
  /// a warning counts them.
  /// @throws pretrained::FileFormatError for a broken file, c10::ValueError for options
  /// @throws c10::TypeError for a table of a storage dtype such as float8 if no dtype is given to
  ///     convert to
  static POSEMBED_API TokenEmbedding
  from_file(const std::string& path,
            const std::optional<std::vector<std::string>>& vocabulary = std::nullopt,
            const pretrained::ReadOptions& read = {}, bool freeze = true,
            TokenOptions options = {0, 0}, const pretrained::OpenOptions& open = {});
};

}  // namespace posembed
