// C++ calls of the input operators, through the dispatcher as in Python. C++ code passes their long
// common list of arguments as one struct.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "dispatcher/call.h"
#include "dispatcher/spread.h"
#include "dispatcher/tensors.h"
#include "posembed/input.h"
#include "token/operator.h"

namespace posembed::dispatcher {

template <>
struct EnumArgument<InputNorm> {
  static constexpr const char* argument = "norm";
  static constexpr InputNorm values[] = {InputNorm::none, InputNorm::layer, InputNorm::rms};
};

}  // namespace posembed::dispatcher

namespace posembed::input {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Text = std::string_view;

/// Arguments of the input operators, in the order of their schemas; the offset is a number.
struct Input : InputParts {
  Tensor token;           // [num_embeddings, embedding_dim]
  Tensor ids;             // int [batch, seq]
  bool own_rows = false;  // ids are 0, 1, …: each token has its own row

  template <typename Self>
  static auto fields(Self& self) {
    return std::tie(self.token, self.ids, self.position(), self.positions(), self.token_type(),
                    self.types(), self.norm_weight(), self.norm_bias(), self.seed(), self.offset(),
                    self.first_row(), self.sinusoid(), self.norm(), self.eps(), self.scale(),
                    self.dropout(), self.padding_idx(), self.position_padding_idx(),
                    self.gradient(), self.first_token(), self.own_rows);
  }
};

template <typename Result, typename... Tensors>
using Spread = dispatcher::Spread<Input, Result(Tensors...)>;

using InputEmbeddingOperator = Spread<Tensor>;

inline Tensor call_input_embedding(const Input& in) {
  static const auto handle =
      dispatcher::find<InputEmbeddingOperator::Signature>("posembed::input_embedding");
  return InputEmbeddingOperator::call(handle, in);
}

/// The output, and mean and rstd of each token's sum for the backward pass.
using Forward = std::tuple<Tensor, Tensor, Tensor>;
using ForwardOperator = Spread<Forward>;

inline Forward call_input_embedding_forward(const Input& in) {
  static const auto handle =
      dispatcher::find<ForwardOperator::Signature>("posembed::input_embedding_forward");
  return ForwardOperator::call(handle, in);
}

/// Gradients of the norm's input [batch, seq, embedding_dim], of the norm's weight and bias, of the
/// position table and of the type table. Empty: the first without norm and dropout, where it equals
/// the output's gradient; those of absent inputs; the position table's if positions are given and
/// the type table's if it has many rows, because these need a sort.
using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using BackwardOperator = Spread<Backward, const Tensor&, const Tensor&, const Tensor&>;

inline Backward call_input_embedding_backward(const Tensor& gradient, const Tensor& mean,
                                              const Tensor& rstd, const Input& in) {
  static const auto handle =
      dispatcher::find<BackwardOperator::Signature>("posembed::input_embedding_backward");
  return BackwardOperator::call(handle, gradient, mean, rstd, in);
}

/// The token table's gradient as the ids of touched rows, ascending, and the rows; then the
/// gradients of Backward after its first.
using BackwardRows = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using BackwardRowsOperator = Spread<BackwardRows, const Tensor&, const Tensor&, const Tensor&>;

inline BackwardRows call_input_embedding_backward_rows(const Tensor& gradient, const Tensor& mean,
                                                       const Tensor& rstd, const Input& in) {
  static const auto handle =
      dispatcher::find<BackwardRowsOperator::Signature>("posembed::input_embedding_backward_rows");
  return BackwardRowsOperator::call(handle, gradient, mean, rstd, in);
}

/// The same from the gradient of the output.
BackwardRows with_rows(const Input& in, const Tensor& gradient, const Backward& found);

/// x with the dropout that input_embedding applies with the same seed; `first` is the index of its
/// first element in the mask.
inline Tensor call_input_dropout(const Tensor& x, const Tensor& seed, double probability,
                                 const c10::SymInt& first) {
  using Signature = Tensor(const Tensor&, const Tensor&, double, c10::SymInt);
  static const auto handle = dispatcher::find<Signature>("posembed::input_dropout");
  return handle.call(x, seed, probability, first);
}

inline bool drops(const Input& in) { return in.seed().has_value() && in.dropout() > 0; }
inline bool norms(const Input& in) { return in.norm() != InputNorm::none; }

/// Whether the gradient of the sum differs from the gradient of the output.
inline bool changes(const Input& in) { return norms(in) || drops(in); }

/// Whether positions are consecutive rows of a table, whose gradient is then a sum over the batch.
inline bool counts_positions(const Input& in) {
  return in.position().has_value() && !in.positions().has_value();
}

using dispatcher::compute_type;

/// Position encodings without a table, [seq, embedding_dim] or [batch, seq, embedding_dim] in the
/// compute type.
Tensor encoding(const Input& in);

}  // namespace posembed::input
