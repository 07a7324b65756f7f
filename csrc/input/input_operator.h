// The input operators, as C++ code calls them and as their kernels are registered. C++ code passes
// their long common list of arguments as one struct.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "dispatcher/operator.h"
#include "dispatcher/tensors.h"
#include "input/input.h"
#include "posembed/input.h"
#include "sinusoidal/sinusoidal_operator.h"
#include "token/token_operator.h"

namespace posembed::dispatcher {

template <>
struct EnumArgument<InputNorm> {
  static constexpr const char* argument = "norm";
  static constexpr const char* names[] = {"none", "layer", "rms"};
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

  POSEMBED_FIELDS(self.token, self.ids, self.position(), self.positions(), self.token_type(),
                  self.types(), self.norm_weight(), self.norm_bias(), self.seed(), self.offset(),
                  self.first_row(), self.sinusoid(), self.norm(), self.eps(), self.scale(),
                  self.dropout(), self.padding_idx(), self.position_padding_idx(), self.gradient(),
                  self.first_token(), self.own_rows)
};

template <typename Result, typename... Tensors>
using Operator = dispatcher::Operator<Result(Tensors...), Input>;

inline const Operator<Tensor> input_embedding{"input_embedding"};

/// The output, and mean and rstd of each token's sum for the backward pass.
using Forward = std::tuple<Tensor, Tensor, Tensor>;
inline const Operator<Forward> input_embedding_forward{"input_embedding_forward"};

/// Gradients of the norm's input [batch, seq, embedding_dim], of the norm's weight and bias, of the
/// position table and of the type table. Empty: the first without norm and dropout, where it equals
/// the output's gradient; those of absent inputs; the position table's if positions are given and
/// the type table's if it has many rows, because these need a sort.
using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

/// The output's gradient, mean, rstd.
inline const Operator<Backward, const Tensor&, const Tensor&, const Tensor&>
    input_embedding_backward{"input_embedding_backward"};

/// The token table's gradient as the ids of touched rows, ascending, and the rows; then the
/// gradients of Backward after its first.
using BackwardRows = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
inline const Operator<BackwardRows, const Tensor&, const Tensor&, const Tensor&>
    input_embedding_backward_rows{"input_embedding_backward_rows"};

/// The same from the gradient of the output.
BackwardRows with_rows(const Input& in, const Tensor& gradient, const Backward& parts);

/// The results of input_embedding_forward and input_embedding_backward by a chain of operators,
/// which have derivatives of every order. An index outside its table has a row of zeros.
Forward forward_chain(const Input& in);
Backward backward_chain(const Input& in, const Tensor& output_gradient);

/// x with the dropout that input_embedding applies with the same seed: x, seed, probability, and
/// the index of the first element in the mask.
inline const dispatcher::Operator<Tensor(const Tensor&, const Tensor&, double, c10::SymInt)>
    input_dropout{"input_dropout"};

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

// ------------------------------------------------------------------------------------------ checks

/// Whether there are so few types that the kernel sums the table's gradient per type.
inline bool has_few_types(const Input& in) {
  return in.token_type().has_value() && in.token_type()->sym_size(0) <= max_types;
}

}  // namespace posembed::input
