// C++ calls of the token operators, through the dispatcher as in Python.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "core/device_error.h"
#include "dispatcher/call.h"
#include "dispatcher/tensors.h"

namespace posembed::token {

using at::Tensor;
using Text = std::string_view;

inline Tensor call_embedding(const Tensor& weight, const Tensor& ids, int64_t padding_idx = -1,
                             double scale = 1.0, bool scale_grad_by_freq = false,
                             Text gradient = "dense", int64_t vocabulary_start = -1) {
  using Signature = Tensor(const Tensor&, const Tensor&, int64_t, double, bool, Text, int64_t);
  static const auto handle = dispatcher::find<Signature>("posembed::embedding");
  return handle.call(weight, ids, padding_idx, scale, scale_grad_by_freq, gradient,
                     vocabulary_start);
}

inline Tensor call_embedding_backward(const Tensor& gradient, const Tensor& ids,
                                      const c10::SymInt& num_embeddings, int64_t padding_idx = -1,
                                      double scale = 1.0, bool scale_grad_by_freq = false,
                                      int64_t vocabulary_start = -1) {
  using Signature =
      Tensor(const Tensor&, const Tensor&, c10::SymInt, int64_t, double, bool, int64_t);
  static const auto handle = dispatcher::find<Signature>("posembed::embedding_backward");
  return handle.call(gradient, ids, num_embeddings, padding_idx, scale, scale_grad_by_freq,
                     vocabulary_start);
}

/// Indices of the touched rows, ascending, and the rows.
inline std::tuple<Tensor, Tensor> call_embedding_backward_rows(
    const Tensor& gradient, const Tensor& ids, const c10::SymInt& num_embeddings,
    int64_t padding_idx = -1, double scale = 1.0, bool scale_grad_by_freq = false,
    int64_t vocabulary_start = -1) {
  using Signature = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, c10::SymInt, int64_t,
                                               double, bool, int64_t);
  static const auto handle = dispatcher::find<Signature>("posembed::embedding_backward_rows");
  return handle.call(gradient, ids, num_embeddings, padding_idx, scale, scale_grad_by_freq,
                     vocabulary_start);
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
Tensor table_gradient(const Tensor& gradient, const Tensor& ids, const c10::SymInt& num_embeddings,
                      int64_t padding_idx, double scale, bool scale_grad_by_freq, Text form,
                      int64_t vocabulary_start = -1);

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

/// Raises c10::ValueError if there are more ids or rows than can be sorted.
void check_sortable(const Tensor& ids, const c10::SymInt& num_embeddings);

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
