/// Bags of tokens: the rows of several ids are pooled into their sum, mean or maximum. Works like
/// torch::nn::EmbeddingBag, but accumulates in float32, rounds once, checks ids and offsets, and
/// its gradients have the same bits for any number of threads.
#pragma once

#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "posembed/export.h"
#include "posembed/token.h"

namespace posembed {

/// How a bag's rows are pooled.
enum class BagMode {
  sum,   ///< the sum of the rows, each times its weight if weights are given
  mean,  ///< the mean of the rows
  max,   ///< the maximum of each component
};

/// "sum", "mean" or "max".
POSEMBED_API const char* name(BagMode mode);

/// Options of functional::token_bag().
struct POSEMBED_API BagCall {
  /// int32/int64 [bags]: where each bag begins. The first is 0, and they never decrease; a bag
  /// whose offset equals the next one is empty.
  TORCH_ARG(std::optional<torch::Tensor>, offsets) = std::nullopt;
  /// For BagMode::sum, a factor for each row: in the shape of the ids and the dtype of the table.
  TORCH_ARG(std::optional<torch::Tensor>, weights) = std::nullopt;
  /// How a bag's rows are pooled.
  TORCH_ARG(BagMode, mode) = BagMode::sum;
  /// An id that is left out of every bag.
  TORCH_ARG(std::optional<int64_t>, padding_idx) = std::nullopt;
  /// Offsets have one more element: the number of ids.
  TORCH_ARG(bool, include_last_offset) = false;
  /// The form of the table's gradient.
  TORCH_ARG(TableGradient, gradient) = TableGradient::dense;
};

namespace functional {

/// Pools the rows of each bag; gradients flow to `weight` and `weights`.
/// @param ids  int32/int64 [bags, size]; or [count], split into bags by the call's offsets
/// @param weight  floating [num_embeddings, embedding_dim]
/// @return [bags, embedding_dim]; zeros for a bag without ids
/// @throws c10::ValueError shapes and options; c10::TypeError dtypes; c10::IndexError ids, offsets
POSEMBED_API torch::Tensor token_bag(const torch::Tensor& ids, const torch::Tensor& weight,
                                     const BagCall& call = {});

/// The same for a table of codes, whose rows are summed in float32; no gradient.
/// @param dtype  of the result
POSEMBED_API torch::Tensor token_bag(const torch::Tensor& ids, const QuantizedRows& rows,
                                     const BagCall& call = {}, torch::Dtype dtype = torch::kFloat);

}  // namespace functional

/// Options of TokenBag.
struct POSEMBED_API TokenBagOptions {
  TokenBagOptions(int64_t num_embeddings, int64_t embedding_dim)
      : num_embeddings_(num_embeddings), embedding_dim_(embedding_dim) {}

  /// Rows of the table.
  TORCH_ARG(int64_t, num_embeddings);
  /// Components of a row.
  TORCH_ARG(int64_t, embedding_dim);
  /// How a bag's rows are pooled.
  TORCH_ARG(BagMode, mode) = BagMode::sum;
  /// An id that is left out of every bag; its row starts as zeros. A negative one counts from the
  /// end of the table.
  TORCH_ARG(std::optional<int64_t>, padding_idx) = std::nullopt;
  /// Offsets have one more element: the number of ids.
  TORCH_ARG(bool, include_last_offset) = false;
  /// The form of weight.grad().
  TORCH_ARG(TableGradient, gradient) = TableGradient::dense;
  /// The table itself, instead of one filled with N(0, 1).
  TORCH_ARG(torch::Tensor, _weight) = torch::Tensor();
};

/// A table of token vectors, pooled per bag; `weight` is [num_embeddings, embedding_dim].
///
///     posembed::TokenBag bag(posembed::TokenBagOptions(30522, 384));
///     auto documents = bag->forward(ids, offsets, tf_idf);   // [documents, 384]
class POSEMBED_API TokenBagImpl : public torch::nn::Cloneable<TokenBagImpl> {
 public:
  TokenBagImpl(int64_t num_embeddings, int64_t embedding_dim)
      : TokenBagImpl(TokenBagOptions(num_embeddings, embedding_dim)) {}
  explicit TokenBagImpl(TokenBagOptions options);

  void reset() override;
  /// N(0, 1), and zeros for padding_idx.
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  /// See functional::token_bag.
  torch::Tensor forward(const torch::Tensor& ids,
                        const std::optional<torch::Tensor>& offsets = std::nullopt,
                        const std::optional<torch::Tensor>& weights = std::nullopt);

  /// As TokenEmbedding's.
  void quantize(const std::string& format = "float8", int64_t block = 0);
  int64_t memory() const;

  /// Read at construction, which converts a negative padding_idx to an index from the start.
  TokenBagOptions options;
  torch::Tensor weight;
  /// Empty unless the table is quantised; `weight` is then undefined.
  QuantizedTable table{nullptr};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(std::optional<torch::Tensor>())},
                           {2, torch::nn::AnyValue(std::optional<torch::Tensor>())})
};

class TokenBag : public torch::nn::ModuleHolder<TokenBagImpl> {
 public:
  using torch::nn::ModuleHolder<TokenBagImpl>::ModuleHolder;

  /// A module that shares `weight` [num_embeddings, embedding_dim]. The sizes in `options` are
  /// ignored.
  static POSEMBED_API TokenBag from_pretrained(const torch::Tensor& weight, bool freeze = true,
                                               TokenBagOptions options = {0, 0});

  /// A module with vectors of a file; see TokenEmbedding::from_file.
  static POSEMBED_API TokenBag
  from_file(const std::string& path,
            const std::optional<std::vector<std::string>>& vocabulary = std::nullopt,
            const pretrained::ReadOptions& read = {}, bool freeze = true,
            TokenBagOptions options = {0, 0}, const pretrained::OpenOptions& open = {});
};

}  // namespace posembed
