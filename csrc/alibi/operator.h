// C++ calls of the ALiBi operators, through the dispatcher as in Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "dispatcher/call.h"
#include "dispatcher/spread.h"

namespace posembed::alibi {

using at::Tensor;
using Text = std::string_view;
using MaybeTensor = std::optional<Tensor>;
using MaybeOffset = std::optional<c10::SymInt>;
using MaybeType = std::optional<at::ScalarType>;

/// The positions of queries and keys, and which keys are visible.
struct Places {
  MaybeTensor query_positions;
  MaybeTensor key_positions;
  MaybeTensor cu_seqlens;
  MaybeTensor attention_mask;
  MaybeOffset query_offset = std::nullopt;  // none: the last query is at the last key
  bool causal = true;

  template <typename Self>
  static auto fields(Self& self) {
    return std::tie(self.query_positions, self.key_positions, self.cu_seqlens, self.attention_mask,
                    self.query_offset, self.causal);
  }
};

/// Throws c10::ValueError unless `scores` has a matrix for each head, or for each batch and head.
void check_matrix_shape(const Tensor& scores, const char* argument);

using SlopesOperator = Tensor(int64_t, Text, double, std::optional<int64_t>, int64_t,
                              at::ArrayRef<double>, double, std::optional<at::Device>);
using Positions = Tensor(const Tensor&);

/// Operators that take Places after the arguments of `Function`, and `Trailing` after them.
template <typename Function, typename... Trailing>
using Spread = dispatcher::Spread<Places, Function, Trailing...>;

using Bias = Spread<Tensor(const Tensor&, c10::SymInt, c10::SymInt), bool, MaybeType>;
using BiasOut = Spread<void(const Tensor&, const Tensor&, c10::SymInt, c10::SymInt), bool>;
using BiasBackward = Spread<Tensor(const Tensor&), bool, MaybeType>;
template <typename Result>
using OnScores = Spread<Result(const Tensor&, const Tensor&), bool, double>;
using SoftmaxBackward = Spread<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&), bool,
                               double, int64_t, MaybeType>;
using LseCorrection = Tensor(const Tensor&, c10::SymInt, c10::SymInt, c10::SymInt, Text, bool);

template <typename... Given>
Tensor call_slopes(Given&&... given) {
  static const auto handle = dispatcher::find<SlopesOperator>("posembed::alibi_slopes");
  return handle.call(std::forward<Given>(given)...);
}

inline Tensor call_positions(const Tensor& attention_mask) {
  static const auto handle = dispatcher::find<Positions>("posembed::alibi_positions");
  return handle.call(attention_mask);
}

/// hide: if true, hidden keys get -infinity; otherwise their bias is 0.
inline Tensor call_bias(const Tensor& slopes, const c10::SymInt& queries, const c10::SymInt& keys,
                        const Places& places, bool hide, MaybeType dtype) {
  static const auto handle = dispatcher::find<Bias::Signature>("posembed::alibi_bias");
  return Bias::call(handle, slopes, queries, keys, places, hide, dtype);
}

inline void call_bias_out(const Tensor& out, const Tensor& slopes, const c10::SymInt& queries,
                          const c10::SymInt& keys, const Places& places, bool hide) {
  static const auto handle = dispatcher::find<BiasOut::Signature>("posembed::alibi_bias_out");
  BiasOut::call(handle, out, slopes, queries, keys, places, hide);
}

inline Tensor call_bias_backward(const Tensor& grad, const Places& places, bool two_sided,
                                 MaybeType dtype) {
  static const auto handle =
      dispatcher::find<BiasBackward::Signature>("posembed::alibi_bias_backward");
  return BiasBackward::call(handle, grad, places, two_sided, dtype);
}

/// scale: multiplies the scores, not the bias.
inline Tensor call_add(const Tensor& scores, const Tensor& slopes, const Places& places, bool hide,
                       double scale) {
  using Operator = OnScores<Tensor>;
  static const auto handle = dispatcher::find<Operator::Signature>("posembed::alibi_add");
  return Operator::call(handle, scores, slopes, places, hide, scale);
}

inline void call_add_in_place(const Tensor& scores, const Tensor& slopes, const Places& places,
                              bool hide, double scale) {
  using Operator = OnScores<void>;
  static const auto handle = dispatcher::find<Operator::Signature>("posembed::alibi_add_");
  Operator::call(handle, scores, slopes, places, hide, scale);
}

inline Tensor call_softmax(const Tensor& scores, const Tensor& slopes, const Places& places,
                           bool hide, double scale) {
  using Operator = OnScores<Tensor>;
  static const auto handle = dispatcher::find<Operator::Signature>("posembed::alibi_softmax");
  return Operator::call(handle, scores, slopes, places, hide, scale);
}

inline void call_softmax_in_place(const Tensor& scores, const Tensor& slopes, const Places& places,
                                  bool hide, double scale) {
  using Operator = OnScores<void>;
  static const auto handle = dispatcher::find<Operator::Signature>("posembed::alibi_softmax_");
  Operator::call(handle, scores, slopes, places, hide, scale);
}

/// sides: slopes per head; 0: their gradient is not requested, and the result is empty.
inline std::tuple<Tensor, Tensor> call_softmax_backward(const Tensor& grad, const Tensor& weights,
                                                        const Places& places, bool hide,
                                                        double scale, int64_t sides,
                                                        MaybeType dtype) {
  static const auto handle =
      dispatcher::find<SoftmaxBackward::Signature>("posembed::alibi_softmax_backward");
  return SoftmaxBackward::call(handle, grad, weights, places, hide, scale, sides, dtype);
}

template <typename... Given>
Tensor call_lse_correction(Given&&... given) {
  static const auto handle = dispatcher::find<LseCorrection>("posembed::alibi_lse_correction");
  return handle.call(std::forward<Given>(given)...);
}

}  // namespace posembed::alibi
