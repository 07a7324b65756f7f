/// The whole input of a Transformer in one kernel: the sum of token, position and type rows, then
/// norm and dropout. Devlin et al., "BERT", arXiv:1810.04805; Vaswani et al., "Attention Is All You
/// Need", arXiv:1706.03762.
#pragma once

#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "posembed/export.h"
#include "posembed/given.h"
#include "posembed/learned.h"
#include "posembed/offset.h"
#include "posembed/sinusoidal.h"
#include "posembed/token.h"

namespace posembed {

class ModelPositions;

/// Where InputEmbedding's positions come from.
enum class Positions { none, learned, sinusoidal };

/// How tokens get positions if none are given.
enum class PositionRule {
  consecutive,  ///< offset, offset + 1, … for every token
  /// Padding is not counted: it has position -1, whose row gets no gradient. With sinusoids, which
  /// are then fairseq's, padding's encoding is zero.
  roberta,
  opt,  ///< the same, but an attention mask marks padding, and its row is trained
};

/// How InputEmbedding normalises the sum.
enum class InputNorm {
  none,
  layer,  ///< LayerNorm: Ba et al., arXiv:1607.06450
  rms,    ///< RMSNorm: Zhang and Sennrich, arXiv:1910.07467
};

/// "none", "layer" or "rms".
POSEMBED_API const char* name(InputNorm norm);

/// Tables and options of functional::input_embedding().
struct POSEMBED_API InputParts {
  /// Learned positions: a table [first_row + max_positions, embedding_dim].
  TORCH_ARG(std::optional<torch::Tensor>, position) = std::nullopt;
  /// int32/int64 [seq] or [batch, seq]; default: offset, offset + 1, …
  TORCH_ARG(std::optional<torch::Tensor>, positions) = std::nullopt;
  /// Token types: a table [num_types, embedding_dim].
  TORCH_ARG(std::optional<torch::Tensor>, token_type) = std::nullopt;
  /// int32/int64 [batch, seq]; default: type 0.
  TORCH_ARG(std::optional<torch::Tensor>, types) = std::nullopt;
  /// [embedding_dim]
  TORCH_ARG(std::optional<torch::Tensor>, norm_weight) = std::nullopt;
  /// [embedding_dim], for LayerNorm.
  TORCH_ARG(std::optional<torch::Tensor>, norm_bias) = std::nullopt;
  /// Seed of the dropout mask: int64 with one element; default: drawn from torch's generator.
  TORCH_ARG(std::optional<torch::Tensor>, seed) = std::nullopt;
  /// The position of the first token if no positions are given.
  TORCH_ARG(Offset, offset) = 0;
  /// The row of position 0.
  TORCH_ARG(int64_t, first_row) = 0;
  /// SinusoidalSpec::to_json(): sinusoids instead of a table of positions; empty: none.
  TORCH_ARG(std::string, sinusoid) = {};
  /// How the sum is normalised.
  TORCH_ARG(InputNorm, norm) = InputNorm::none;
  /// Added to the norm's variance.
  TORCH_ARG(double, eps) = 1e-5;
  /// Multiplies the token rows.
  TORCH_ARG(double, scale) = 1.0;
  /// Probability of dropping a component.
  TORCH_ARG(double, dropout) = 0.0;
  /// The token row that gets no gradient; -1: none.
  TORCH_ARG(int64_t, padding_idx) = -1;
  /// The row of `position`, before first_row, that gets no gradient; -1: none.
  TORCH_ARG(int64_t, position_padding_idx) = -1;
  /// The form of the token table's gradient.
  TORCH_ARG(TableGradient, gradient) = TableGradient::dense;
  /// Index of this call's first token in the dropout mask.
  TORCH_ARG(c10::SymInt, first_token) = 0;

 public:
  /// Sinusoids instead of a table of positions.
  InputParts& sinusoid(const SinusoidalSpec& spec) { return sinusoid(spec.to_json()); }
};

namespace functional {

/// Sums token, type and position rows and applies norm and dropout, in one kernel. Gradients flow
/// to the tables and the norm.
/// @param ids  int32/int64 [batch, seq]
/// @param token  floating [num_embeddings, embedding_dim]
/// @return [batch, seq, embedding_dim]
/// @throws c10::ValueError shapes and options; c10::TypeError dtypes; c10::IndexError ids,
///     positions, types
POSEMBED_API torch::Tensor input_embedding(const torch::Tensor& ids, const torch::Tensor& token,
                                           const InputParts& parts = {});

}  // namespace functional

/// Options of InputEmbedding.
struct POSEMBED_API InputOptions {
  InputOptions(int64_t num_embeddings, int64_t embedding_dim)
      : num_embeddings_(num_embeddings), embedding_dim_(embedding_dim) {}

  /// Rows of the token table.
  TORCH_ARG(int64_t, num_embeddings);
  /// Components of a row.
  TORCH_ARG(int64_t, embedding_dim);
  /// Where positions come from.
  TORCH_ARG(Positions, positions) = Positions::learned;
  /// Rows of the position table, for learned positions.
  TORCH_ARG(std::optional<int64_t>, max_positions) = std::nullopt;
  /// Rows of the table of token types (segments); 0: no such table.
  TORCH_ARG(int64_t, num_types) = 0;
  /// How the sum is normalised.
  TORCH_ARG(InputNorm, norm) = InputNorm::none;
  /// Added to the norm's variance.
  TORCH_ARG(Given<double>, eps) = Given<double>::default_to(1e-5);
  /// Probability of dropping a component, in training.
  TORCH_ARG(double, dropout) = 0.0;
  /// A token row that starts as zeros and gets no gradient.
  TORCH_ARG(std::optional<int64_t>, padding_idx) = std::nullopt;
  /// How tokens get positions. The row of position 0 is padding_idx + 1 with roberta and 2 with
  /// opt, which is only for learned positions.
  TORCH_ARG(PositionRule, position_rule) = PositionRule::consecutive;
  /// Components of a row of the token table, if not embedding_dim: `projection`, a Linear without
  /// bias, maps them to embedding_dim (OPT-350m).
  TORCH_ARG(std::optional<int64_t>, token_dim) = std::nullopt;
  /// Components of the result, if not embedding_dim: `projection`, a Linear, maps to them after
  /// norm and dropout (ELECTRA, ALBERT).
  TORCH_ARG(std::optional<int64_t>, output_dim) = std::nullopt;
  /// The form of the token table's gradient.
  TORCH_ARG(TableGradient, gradient) = TableGradient::dense;

 public:
  /// Multiplies the token rows; default: 1.
  InputOptions& scale(double scale) {
    scale_ = scale;
    return *this;
  }
  /// Scale token rows by the square root of embedding_dim.
  InputOptions& sqrt_dim() {
    scale_.reset();
    return *this;
  }
  double scale() const { return scale_.value_or(std::sqrt(static_cast<double>(embedding_dim_))); }

 private:
  std::optional<double> scale_ = 1.0;  // none: the square root of embedding_dim
};

/// The parameters of InputEmbedding's norm: `weight`, ones, and for a LayerNorm `bias`, zeros.
class POSEMBED_API InputNormImpl : public torch::nn::Cloneable<InputNormImpl> {
 public:
  InputNormImpl(InputNorm kind, int64_t embedding_dim, double eps);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  InputNorm kind;
  int64_t embedding_dim;
  double eps;
  torch::Tensor weight;
  torch::Tensor bias;
};

/// A Linear that prints itself as Python's Linear does.
class POSEMBED_API InputProjectionImpl : public torch::nn::LinearImpl {
 public:
  using torch::nn::LinearImpl::LinearImpl;

  void pretty_print(std::ostream& stream) const override;
};

/// Options of a call of InputEmbedding:
///
///     auto h = embed->forward(ids, posembed::InputCall().types(types).offset(17));
struct POSEMBED_API InputCall {
  /// int32/int64 [seq] or [batch, seq]; default: counted from `offset` by position_rule.
  TORCH_ARG(std::optional<torch::Tensor>, positions) = std::nullopt;
  /// int32/int64 [batch, seq]; default: type 0.
  TORCH_ARG(std::optional<torch::Tensor>, types) = std::nullopt;
  /// The position of the first token if no positions are given: the number of tokens in a cache.
  TORCH_ARG(Offset, offset) = 0;
  /// For PositionRule::opt: bool, int32 or int64 [batch, offset + seq], 0 for padding.
  TORCH_ARG(std::optional<torch::Tensor>, attention_mask) = std::nullopt;
  /// Seed of the dropout mask: int64 with one element; default: drawn from torch's generator.
  TORCH_ARG(std::optional<torch::Tensor>, seed) = std::nullopt;
  /// Index of this call's first token in the dropout mask: calls for parts of the input, with one
  /// seed, draw the mask of the whole.
  TORCH_ARG(int64_t, first_token) = 0;
  /// Packed documents, with batch 1: int32/int64 [documents + 1], the token at which each begins,
  /// then the number of tokens. Positions restart at `offset` in each.
  TORCH_ARG(std::optional<torch::Tensor>, cu_seqlens) = std::nullopt;
  /// Instead of ids: floating [batch, seq, embedding_dim], or token_dim components, in the dtype of
  /// the tables. They replace the scaled token rows. PositionRule::roberta counts all of them,
  /// because no id marks padding.
  TORCH_ARG(std::optional<torch::Tensor>, inputs_embeds) = std::nullopt;
};

/// Turns ids into the vectors that enter the first block of a Transformer.
///
///     posembed::InputEmbedding embed(posembed::InputOptions(30522, 768).max_positions(512)
///                                        .num_types(2).norm(posembed::InputNorm::layer));
///     auto h = embed->forward(ids);  // [batch, seq] -> [batch, seq, 768]
class POSEMBED_API InputEmbeddingImpl : public torch::nn::Cloneable<InputEmbeddingImpl> {
 public:
  InputEmbeddingImpl(int64_t num_embeddings, int64_t embedding_dim)
      : InputEmbeddingImpl(InputOptions(num_embeddings, embedding_dim)) {}
  explicit InputEmbeddingImpl(const InputOptions& options);
  /// More numbers do not compile.
  template <typename... More>
  InputEmbeddingImpl(int64_t num_embeddings, int64_t embedding_dim, int64_t, More...)
      : InputEmbeddingImpl(num_embeddings, embedding_dim) {
    static_assert(sizeof...(More) > 99,
                  "InputEmbedding takes num_embeddings and embedding_dim; the rest are options: "
                  "InputOptions(30522, 768).max_positions(512)");
  }

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// @param ids  int32/int64 [batch, seq]; an undefined tensor if inputs_embeds are given
  /// @return [batch, seq, embedding_dim], or output_dim components
  /// @throws c10::ValueError shapes and options; c10::TypeError dtypes; c10::IndexError ids,
  ///     positions, types
  torch::Tensor forward(const torch::Tensor& ids, const InputCall& call = {});

  /// As forward(), with features in some places instead of token rows: those of images.
  /// @param features  floating [features, embedding_dim], or token_dim components; they are not
  ///     scaled
  /// @param mask  bool [batch, seq]: the places of the features, in order, as many as there are
  torch::Tensor with_embeddings(const torch::Tensor& ids, const torch::Tensor& features,
                                const torch::Tensor& mask, const InputCall& call = {});

  InputOptions options;
  TokenEmbedding token{nullptr};
  LearnedPositionalEmbedding learned{nullptr};        ///< registered as "position"
  SinusoidalPositionalEmbedding sinusoidal{nullptr};  ///< registered as "position"
  TokenEmbedding token_type{nullptr};
  std::shared_ptr<InputNormImpl> norm;
  std::shared_ptr<InputProjectionImpl> projection;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(InputCall())})

 private:
  std::optional<torch::Tensor> count_positions(const torch::Tensor& ids, bool known,
                                               const InputCall& call) const;
};

class InputEmbedding : public torch::nn::ModuleHolder<InputEmbeddingImpl> {
 public:
  using torch::nn::ModuleHolder<InputEmbeddingImpl>::ModuleHolder;
  using Impl = InputEmbeddingImpl;

  /// Loads a model's input layer; results equal the model's. Reads its tensors only, from
  /// safetensors: one file or the index of several, as transformers' save_pretrained writes them
  /// for models with or without a head. The module is in evaluation mode and has the dtype of the
  /// file's token table.
  ///
  /// Families: BERT, RoBERTa (XLM-RoBERTa, CamemBERT), DistilBERT, ELECTRA, ALBERT, GPT-2, OPT,
  /// M2M100 (NLLB), NLLB-MoE, FSMT; for models with an encoder and a decoder, the encoder's layer.
  /// position_rule counts positions among padding as RoBERTa, fairseq and OPT do; pass OPT's
  /// attention mask to forward().
  ///
  ///     const auto positions = posembed::ModelPositions::read("bert-base-uncased");
  ///     auto embed = posembed::InputEmbedding::from_positions(
  ///         positions, "bert-base-uncased/model.safetensors");
  ///     auto h = embed->forward(ids);  // [batch, seq] -> [batch, seq, 768]
  ///
  /// @param positions  what `python -m posembed describe` writes of the model's folder
  /// @param tensors  the path of the safetensors, or of their index
  /// @throws c10::ValueError a model of no such family, a missing tensor, or one of another shape
  /// @throws pretrained::FileFormatError a malformed file of tensors
  /// @throws std::filesystem::filesystem_error a file cannot be read
  static POSEMBED_API InputEmbedding from_positions(const ModelPositions& positions,
                                                    const std::string& tensors);
};

}  // namespace posembed
