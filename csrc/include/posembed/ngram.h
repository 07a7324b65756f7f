/// Embeddings of n-grams: each token and those before it are hashed to rows of a table, which
/// becomes a memory of the model. Cheng et al., "Conditional Memory via Scalable Lookup" (Engram),
/// arXiv:2601.07372; Pagnoni et al., "Byte Latent Transformer", arXiv:2412.09871; Liu et al.,
/// "Scaling Embeddings Outperforms Scaling Experts" (LongCat), arXiv:2601.21204.
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

#include "posembed/export.h"
#include "posembed/token.h"

namespace posembed {

/// How the tokens of an n-gram become one number. Products and rolling hashes wrap in 64 bits.
enum class NgramRule {
  products,  ///< xor of each token times the multiplier of its distance from the newest
  rolling,   ///< polynomial in the multiplier of a head; the newest token has the highest power
  modular,   ///< polynomial in the multiplier of a head, modulo its modulus: powers do not wrap;
             ///< the oldest token has the highest power
};

/// "xor", "rolling" or "modular".
POSEMBED_API const char* name(NgramRule rule);

/// The numbers that map n-grams to rows of a table.
struct POSEMBED_API NgramSpec {
  /// products: one for each distance from the newest token, from 0; polynomials: one for each
  /// head.
  TORCH_ARG(std::vector<int64_t>, multipliers) = {};
  /// The rows of each head, [sizes, heads] in one list: an id is a hash modulo this, as in
  /// torch.remainder.
  TORCH_ARG(std::vector<int64_t>, moduli) = {};
  /// The first row of each head, as `moduli`; none: heads follow each other.
  TORCH_ARG(std::vector<int64_t>, offsets) = {};
  /// Numbers of tokens of the n-grams, ascending; none: 2, 3, …
  TORCH_ARG(std::vector<int64_t>, sizes) = {};
  /// A token that ends a text: it and those before it count as `padding` for later tokens.
  TORCH_ARG(std::optional<int64_t>, boundary) = std::nullopt;
  /// What tokens before the text count as; none: `boundary`, or 0 if there is none.
  TORCH_ARG(std::optional<int64_t>, padding) = std::nullopt;
  /// How the tokens of an n-gram become one number.
  TORCH_ARG(NgramRule, rule) = NgramRule::products;
  /// Rows of a table, with those that no n-gram has; none: as many as the heads need.
  TORCH_ARG(std::optional<int64_t>, num_embeddings) = std::nullopt;

 public:
  /// The spec of the layers of Qwen's qwen4_exp.
  /// @param layer  which of the layers with n-grams, from 0: each has its own numbers
  /// @param rows  the least number of rows of a head: moduli are the next primes
  /// @param divisor  num_embeddings is a multiple of it
  static NgramSpec qwen4_exp(int64_t vocab_size, int64_t boundary, int64_t layer = 0,
                             int64_t ngram_size = 3, int64_t heads = 8, int64_t rows = 20'000'000,
                             int64_t seed = 1234, int64_t divisor = 128);

  /// The spec of LongCat's models with n-grams.
  /// @param ratio  rows of a head by tokens of the vocabulary
  static NgramSpec longcat(int64_t vocab_size, int64_t boundary = 2, int64_t ngram_size = 4,
                           int64_t heads = 4, double ratio = 78);

  /// The tokens of the longest n-gram.
  int64_t ngram_size() const;
  /// The rows of a table.
  int64_t table_rows() const;
};

/// The tokens of one call beside its ids, [batch, seq] or [seq].
struct POSEMBED_API NgramCall {
  NgramCall() = default;
  /* implicit */ NgramCall(torch::Tensor history) : history_(std::move(history)) {}

  /// int32/int64 [batch, longest - 1], the tokens before the ids; none: padding. With cu_seqlens:
  /// [batch * documents, longest - 1]. A batch of 1 serves every row.
  TORCH_ARG(std::optional<torch::Tensor>, history) = std::nullopt;
  /// int32/int64 [documents + 1]: boundaries of texts packed in each row; no n-gram spans two.
  TORCH_ARG(std::optional<torch::Tensor>, cu_seqlens) = std::nullopt;
  /// bool or integers, as the ids: 0 for what is not text, such as the padding of a batch. N-grams
  /// reach over it, and its own consist of padding.
  TORCH_ARG(std::optional<torch::Tensor>, mask) = std::nullopt;
  /// int32/int64 [batch], or [] for ids [seq]: the tokens of each row before its padding.
  TORCH_ARG(std::optional<torch::Tensor>, lengths) = std::nullopt;
};

namespace functional {

/// The rows of a table for the n-grams that end at each token.
///
///     posembed::NgramSpec spec;
///     spec.multipliers({3, 5, 7}).moduli({11, 13, 17, 19});
///     auto rows = posembed::functional::ngram_ids(ids, spec);  // [batch, seq, 2 sizes * 2 heads]
///
/// @param ids  int32/int64 [batch, seq] or [seq], any numbers
/// @return int64 [batch, seq, sizes * heads], heads of one size side by side
/// @throws c10::ValueError shapes and numbers; c10::TypeError dtypes
POSEMBED_API torch::Tensor ngram_ids(const torch::Tensor& ids, const NgramSpec& spec,
                                     const NgramCall& call = {});

}  // namespace functional

/// Options of NgramEmbedding.
struct POSEMBED_API NgramOptions {
  NgramOptions(NgramSpec spec, int64_t embedding_dim)
      : spec_(std::move(spec)), embedding_dim_(embedding_dim) {}

  /// How n-grams map to rows.
  TORCH_ARG(NgramSpec, spec);
  /// Components of a result.
  TORCH_ARG(int64_t, embedding_dim);
  /// Add the rows of all sizes and heads; otherwise they are joined, and each has an equal part of
  /// the components.
  TORCH_ARG(bool, summed) = false;
  /// The form of weight.grad().
  TORCH_ARG(TableGradient, gradient) = TableGradient::dense;
};

/// A table of hashed n-grams; `weight` is [spec.table_rows(), components of a row].
///
///     auto spec = posembed::NgramSpec::qwen4_exp(50'000, /*boundary=*/2, 0, 3, 4, 1'000);
///     posembed::NgramEmbedding memory(posembed::NgramOptions(spec, 64));
///     auto vectors = memory->forward(ids);              // [batch, seq] -> [batch, seq, 64]
///     auto last = memory->next_history(ids);            // [batch, ngram_size - 1]
///     auto more = memory->forward(next_ids, last);      // as if `ids` came before
class POSEMBED_API NgramEmbeddingImpl : public torch::nn::Cloneable<NgramEmbeddingImpl> {
 public:
  explicit NgramEmbeddingImpl(NgramOptions options);

  void reset() override;
  /// Draws the table from N(0, 1).
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  /// ids [batch, seq] or [seq] -> [batch, seq, embedding_dim]; see functional::ngram_ids.
  torch::Tensor forward(const torch::Tensor& ids, const NgramCall& call = {});

  /// The last tokens that are text, [batch, ngram_size - 1], as `history` of the next call. Its
  /// shape is the same for any length of `ids`, so that a CUDA graph can keep it.
  /// @param call  that of `ids`, without cu_seqlens
  torch::Tensor next_history(const torch::Tensor& ids, const NgramCall& call = {}) const;

  /// As TokenEmbedding's.
  void quantize(const std::string& format = "float8", int64_t block = 0);
  int64_t memory() const;

  /// Read at construction.
  NgramOptions options;
  torch::Tensor weight;
  /// Empty unless the table is quantised; `weight` is then undefined.
  QuantizedTable table{nullptr};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(NgramCall())})
};

TORCH_MODULE(NgramEmbedding);

/// A row for each token and layer of a model, in one table [num_embeddings, num_layers *
/// layer_dim], as in Gemma 3n and 4.
///
///     posembed::PerLayerEmbedding table(262'144, 35, 256, 16.0);
///     auto all = table->forward(ids);      // [batch, seq] -> [batch, seq, 35, 256]
///     auto third = table->layer(ids, 2);   // [batch, seq, 256]; reads no other layer's rows
class POSEMBED_API PerLayerEmbeddingImpl : public torch::nn::Cloneable<PerLayerEmbeddingImpl> {
 public:
  PerLayerEmbeddingImpl(int64_t num_embeddings, int64_t num_layers, int64_t layer_dim,
                        double scale = 1.0);

  void reset() override;
  /// Draws the table from N(0, 1).
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  /// ids [...] -> [..., num_layers, layer_dim]
  torch::Tensor forward(const torch::Tensor& ids);
  /// ids [...] -> [..., layer_dim], those of one layer; a negative number counts from the last.
  torch::Tensor layer(const torch::Tensor& ids, int64_t index);

  /// As TokenEmbedding's.
  void quantize(const std::string& format = "float8", int64_t block = 0);
  int64_t memory() const;

  /// Read at construction and by reset().
  int64_t num_embeddings, num_layers, layer_dim;
  double scale;
  torch::Tensor weight;
  /// Empty unless the table is quantised; `weight` is then undefined.
  QuantizedTable table{nullptr};
};

TORCH_MODULE(PerLayerEmbedding);

}  // namespace posembed
