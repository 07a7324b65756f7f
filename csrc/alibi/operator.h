// C++ calls of the ALiBi operators, through the dispatcher as in Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "dispatcher/call.h"
#include "dispatcher/spread.h"
#include "posembed/alibi.h"

namespace posembed::alibi {

using at::Tensor;
using Text = std::string_view;
using MaybeTensor = std::optional<Tensor>;
using MaybeType = std::optional<at::ScalarType>;

/// An ALiBiCall as the operators take it: its fields in the order of the schemas. Scale is not
/// among them, because only some operators have scores.
struct Call : ALiBiCall {
  Call() = default;
  /* implicit */ Call(ALiBiCall call) : ALiBiCall(std::move(call)) {}

  template <typename Self>
  static auto fields(Self& self) {
    return std::tie(self.causal(), self.query_offset(), self.attention_mask(),
                    self.positions_from_mask(), self.query_positions(), self.key_positions(),
                    self.cu_seqlens(), self.apply_mask());
  }
};

/// Throws c10::ValueError unless `scores` has a matrix for each head, or for each batch and head.
void check_matrix_shape(const Tensor& scores, const char* argument);

template <typename Function>
using Spread = dispatcher::Spread<Call, Function>;

using Bias = Spread<Tensor(const Tensor&, c10::SymInt, c10::SymInt, MaybeType)>;
using BiasOut = Spread<void(const Tensor&, const Tensor&, c10::SymInt, c10::SymInt)>;
using BiasBackward = Spread<Tensor(const Tensor&, bool, MaybeType)>;
template <typename Result>
using OnScores = Spread<Result(const Tensor&, const Tensor&, double)>;
using SoftmaxBackward =
    Spread<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, double, int64_t, MaybeType)>;
using Attention = Spread<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                std::optional<double>, double)>;

inline Tensor call_slopes(int64_t num_heads, Text kind, double max_bias,
                          std::optional<int64_t> total_heads, int64_t head_start,
                          at::ArrayRef<double> values, double factor,
                          std::optional<at::Device> device) {
  using Signature = Tensor(int64_t, Text, double, std::optional<int64_t>, int64_t,
                           at::ArrayRef<double>, double, std::optional<at::Device>);
  static const auto handle = dispatcher::find<Signature>("posembed::alibi_slopes");
  return handle.call(num_heads, kind, max_bias, total_heads, head_start, values, factor, device);
}

inline Tensor call_scaled_slopes(const Tensor& slopes, const c10::SymInt& key_length,
                                 int64_t train_length) {
  using Signature = Tensor(const Tensor&, c10::SymInt, int64_t);
  static const auto handle = dispatcher::find<Signature>("posembed::alibi_scaled_slopes");
  return handle.call(slopes, key_length, train_length);
}

inline Tensor call_positions(const Tensor& attention_mask) {
  using Signature = Tensor(const Tensor&);
  static const auto handle = dispatcher::find<Signature>("posembed::alibi_positions");
  return handle.call(attention_mask);
}

/// dtype: of the result; none: of slopes.
inline Tensor call_bias(const Tensor& slopes, const c10::SymInt& queries, const c10::SymInt& keys,
                        MaybeType dtype, const Call& call) {
  static const auto handle = dispatcher::find<Bias::Signature>("posembed::alibi_bias");
  return Bias::call(handle, slopes, queries, keys, dtype, call);
}

inline void call_bias_out(const Tensor& out, const Tensor& slopes, const c10::SymInt& queries,
                          const c10::SymInt& keys, const Call& call) {
  static const auto handle = dispatcher::find<BiasOut::Signature>("posembed::alibi_bias_out");
  BiasOut::call(handle, out, slopes, queries, keys, call);
}

/// dtype: of the slopes and their gradient; none: of `grad`.
inline Tensor call_bias_backward(const Tensor& grad, bool two_sided, MaybeType dtype,
                                 const Call& call) {
  static const auto handle =
      dispatcher::find<BiasBackward::Signature>("posembed::alibi_bias_backward");
  return BiasBackward::call(handle, grad, two_sided, dtype, call);
}

/// scale: multiplies the scores, not the bias.
inline Tensor call_add(const Tensor& scores, const Tensor& slopes, double scale, const Call& call) {
  using Operator = OnScores<Tensor>;
  static const auto handle = dispatcher::find<Operator::Signature>("posembed::alibi_add");
  return Operator::call(handle, scores, slopes, scale, call);
}

inline void call_add_in_place(const Tensor& scores, const Tensor& slopes, double scale,
                              const Call& call) {
  using Operator = OnScores<void>;
  static const auto handle = dispatcher::find<Operator::Signature>("posembed::alibi_add_");
  Operator::call(handle, scores, slopes, scale, call);
}

inline Tensor call_softmax(const Tensor& scores, const Tensor& slopes, double scale,
                           const Call& call) {
  using Operator = OnScores<Tensor>;
  static const auto handle = dispatcher::find<Operator::Signature>("posembed::alibi_softmax");
  return Operator::call(handle, scores, slopes, scale, call);
}

inline void call_softmax_in_place(const Tensor& scores, const Tensor& slopes, double scale,
                                  const Call& call) {
  using Operator = OnScores<void>;
  static const auto handle = dispatcher::find<Operator::Signature>("posembed::alibi_softmax_");
  Operator::call(handle, scores, slopes, scale, call);
}

/// sides: slopes per head; 0: their gradient is not requested, and the result is empty.
inline std::tuple<Tensor, Tensor> call_softmax_backward(const Tensor& grad, const Tensor& weights,
                                                        double scale, int64_t sides,
                                                        MaybeType dtype, const Call& call) {
  static const auto handle =
      dispatcher::find<SoftmaxBackward::Signature>("posembed::alibi_softmax_backward");
  return SoftmaxBackward::call(handle, grad, weights, scale, sides, dtype, call);
}

/// scale: none: 1 / sqrt(head_dim).
inline Tensor call_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                             const Tensor& slopes, std::optional<double> scale, double dropout,
                             const Call& call) {
  static const auto handle = dispatcher::find<Attention::Signature>("posembed::alibi_attention");
  return Attention::call(handle, query, key, value, slopes, scale, dropout, call);
}

inline Tensor call_lse_correction(const Tensor& slopes, const c10::SymInt& query_length,
                                  const c10::SymInt& query_start, const c10::SymInt& key_start,
                                  Text form, bool causal) {
  using Signature = Tensor(const Tensor&, c10::SymInt, c10::SymInt, c10::SymInt, Text, bool);
  static const auto handle = dispatcher::find<Signature>("posembed::alibi_lse_correction");
  return handle.call(slopes, query_length, query_start, key_start, form, causal);
}

}  // namespace posembed::alibi
