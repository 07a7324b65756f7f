// C++ calls of the token operators, through the dispatcher as in Python.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "core/device_error.h"
#include "dispatcher/call.h"
#include "dispatcher/spread.h"
#include "dispatcher/tensors.h"
#include "posembed/token.h"

namespace posembed::dispatcher {

template <>
struct EnumArgument<TableGradient> {
  static constexpr const char* argument = "gradient";
  static constexpr TableGradient values[] = {TableGradient::dense, TableGradient::rows};
};

}  // namespace posembed::dispatcher

namespace posembed::token {

using at::Tensor;
using Text = std::string_view;

/// Arguments of the embedding operators, in the order of their schemas.
struct Ids {
  Tensor ids;                       // int [...]
  int64_t padding_idx = -1;         // the id whose row gets no gradient; -1: none
  double scale = 1.0;               // multiplies the result
  bool scale_grad_by_freq = false;  // divides a row's gradient by its id's count
  int64_t vocabulary_start = -1;    // the first row's id if the table is part of a vocabulary

  template <typename Self>
  static auto fields(Self& self) {
    return std::tie(self.ids, self.padding_idx, self.scale, self.scale_grad_by_freq,
                    self.vocabulary_start);
  }
};

using Embedding = dispatcher::Spread<Ids, Tensor(const Tensor&), Text>;

inline Tensor call_embedding(const Tensor& weight, const Ids& ids, Text gradient = "dense") {
  static const auto handle = dispatcher::find<Embedding::Signature>("posembed::embedding");
  return Embedding::call(handle, weight, ids, gradient);
}

using EmbeddingBackward = dispatcher::Spread<Ids, Tensor(const Tensor&, c10::SymInt)>;

inline Tensor call_embedding_backward(const Tensor& gradient, const c10::SymInt& num_embeddings,
                                      const Ids& ids) {
  static const auto handle =
      dispatcher::find<EmbeddingBackward::Signature>("posembed::embedding_backward");
  return EmbeddingBackward::call(handle, gradient, num_embeddings, ids);
}

using EmbeddingBackwardRows =
    dispatcher::Spread<Ids, std::tuple<Tensor, Tensor>(const Tensor&, c10::SymInt)>;

/// Ids of the touched rows, ascending, and the rows.
inline std::tuple<Tensor, Tensor> call_embedding_backward_rows(const Tensor& gradient,
                                                               const c10::SymInt& num_embeddings,
                                                               const Ids& ids) {
  static const auto handle =
      dispatcher::find<EmbeddingBackwardRows::Signature>("posembed::embedding_backward_rows");
  return EmbeddingBackwardRows::call(handle, gradient, num_embeddings, ids);
}

/// The table with rows [0, num_embeddings). Old rows keep their bits; new rows are `rows`, or
/// initialised as `initialization` says.
inline Tensor call_embedding_resize(const Tensor& weight, int64_t num_embeddings,
                                    const std::optional<Tensor>& rows, Text initialization,
                                    double covariance_scale,
                                    const std::optional<at::Generator>& generator) {
  using Signature = Tensor(const Tensor&, int64_t, const std::optional<Tensor>&, Text, double,
                           std::optional<at::Generator>);
  static const auto handle = dispatcher::find<Signature>("posembed::embedding_resize");
  return handle.call(weight, num_embeddings, rows, initialization, covariance_scale, generator);
}

/// A gradient of shape [num_embeddings, embedding_dim]. `form`: "dense", or "rows" for a sparse
/// tensor of the touched rows.
Tensor table_gradient(const Tensor& gradient, const c10::SymInt& num_embeddings, const Ids& ids,
                      Text form);

/// The same from the touched rows, ascending and each once.
Tensor sparse_gradient(const Tensor& row_ids, const Tensor& rows,
                       const c10::SymInt& num_embeddings);

/// The rows that a gradient of the table sums, one for each place.
struct Gradient {
  // [..., embedding_dim], contiguous: one for each place, or those that `sources` names.
  const Tensor& rows;
  const Tensor& ids;  // [...], contiguous
  int64_t num_embeddings;
  int64_t padding_idx = -1;
  double scale = 1.0;
  bool scale_grad_by_freq = false;
  int64_t vocabulary_start = -1;
  Tensor sources =
      {};  // int32, read as uint32: index of each place's row in `rows`; undefined: its own
  Tensor factors = {};  // for each place, float64 for float64, otherwise float32; undefined: ones
};

/// The table's gradient [num_embeddings, embedding_dim]. Ids must have been checked.
Tensor dense_gradient(const Gradient& of);

/// Ids of the touched rows, ascending, and the rows.
std::tuple<Tensor, Tensor> rows_gradient(const Gradient& of);

/// Raises c10::ValueError if there are more ids or rows than can be sorted, or than a gradient of
/// the table can hold. `gradient` is that of rows: [..., embedding_dim].
void check_table_size(const Tensor& ids, const c10::SymInt& num_embeddings, const Tensor& gradient);

/// Raises c10::ValueError unless `gradient` is "dense" or "rows".
void check_gradient_form(Text gradient);

/// Throws c10::IndexError for the first id on the CPU that is not a row of the table, before
/// anything is written; `ids` is contiguous. CUDA kernels record bad ids.
void check_ids(const Tensor& ids, int64_t num_embeddings);

/// Options of a look-up: rows [first_row, …) are those of index 0, 1, …
struct Lookup {
  int64_t first_row = 0;
  double scale = 1.0;
  core::ErrorKind kind = core::ErrorKind::token_id;
  bool partial = false;  // part of a vocabulary, where an index outside is not an error
};

/// weight[ids + first_row] * scale on any device; zeros for an index outside, which CUDA records.
/// On the CPU ids must have been checked.
Tensor gather(const Tensor& weight, const Tensor& ids, const Lookup& lookup);

}  // namespace posembed::token
