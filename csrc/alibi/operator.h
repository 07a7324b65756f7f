// How C++ code calls the ALiBi operators: through the dispatcher, as Python does.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "dispatcher/call.h"

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
};

/// How scores become biased scores.
struct Form {
  MaybeOffset query_offset;
  bool causal = true;
  bool hide = true;
  double scale = 1.0;
};

using SlopesOperator = Tensor(int64_t, Text, double, std::optional<int64_t>, int64_t,
                              at::ArrayRef<double>, double, std::optional<at::Device>);
using Positions = Tensor(const Tensor&);
using Bias = Tensor(const Tensor&, c10::SymInt, c10::SymInt, const MaybeTensor&, const MaybeTensor&,
                    const MaybeTensor&, const MaybeTensor&, MaybeOffset, bool, bool, MaybeType);
using BiasOut = void(const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, const MaybeTensor&,
                     const MaybeTensor&, const MaybeTensor&, const MaybeTensor&, MaybeOffset, bool,
                     bool);
using BiasBackward = Tensor(const Tensor&, const MaybeTensor&, const MaybeTensor&,
                            const MaybeTensor&, const MaybeTensor&, MaybeOffset, bool, bool,
                            MaybeType);
template <typename Result>
using OnScores = Result(const Tensor&, const Tensor&, const MaybeTensor&, const MaybeTensor&,
                        const MaybeTensor&, const MaybeTensor&, MaybeOffset, bool, bool, double);
using SoftmaxBackward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const MaybeTensor&,
                                                   const MaybeTensor&, const MaybeTensor&,
                                                   const MaybeTensor&, MaybeOffset, bool, bool,
                                                   double, int64_t, MaybeType);
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

inline Tensor call_bias(const Tensor& slopes, c10::SymInt queries, c10::SymInt keys,
                        const Places& at, const Form& form, MaybeType dtype) {
  static const auto handle = dispatcher::find<Bias>("posembed::alibi_bias");
  return handle.call(slopes, std::move(queries), std::move(keys), at.query_positions,
                     at.key_positions, at.cu_seqlens, at.attention_mask, form.query_offset,
                     form.causal, form.hide, dtype);
}

inline void call_bias_out(const Tensor& out, const Tensor& slopes, c10::SymInt queries,
                          c10::SymInt keys, const Places& at, const Form& form) {
  static const auto handle = dispatcher::find<BiasOut>("posembed::alibi_bias_out");
  handle.call(out, slopes, std::move(queries), std::move(keys), at.query_positions,
              at.key_positions, at.cu_seqlens, at.attention_mask, form.query_offset, form.causal,
              form.hide);
}

inline Tensor call_bias_backward(const Tensor& grad, const Places& at, const Form& form,
                                 bool two_sided, MaybeType dtype) {
  static const auto handle = dispatcher::find<BiasBackward>("posembed::alibi_bias_backward");
  return handle.call(grad, at.query_positions, at.key_positions, at.cu_seqlens, at.attention_mask,
                     form.query_offset, form.causal, two_sided, dtype);
}

template <typename Result>
Result call_on_scores(const c10::TypedOperatorHandle<OnScores<Result>>& handle,
                      const Tensor& scores, const Tensor& slopes, const Places& at,
                      const Form& form) {
  return handle.call(scores, slopes, at.query_positions, at.key_positions, at.cu_seqlens,
                     at.attention_mask, form.query_offset, form.causal, form.hide, form.scale);
}

inline Tensor call_add(const Tensor& scores, const Tensor& slopes, const Places& at,
                       const Form& form) {
  static const auto handle = dispatcher::find<OnScores<Tensor>>("posembed::alibi_add");
  return call_on_scores(handle, scores, slopes, at, form);
}

inline void call_add_in_place(const Tensor& scores, const Tensor& slopes, const Places& at,
                              const Form& form) {
  static const auto handle = dispatcher::find<OnScores<void>>("posembed::alibi_add_");
  call_on_scores(handle, scores, slopes, at, form);
}

inline Tensor call_softmax(const Tensor& scores, const Tensor& slopes, const Places& at,
                           const Form& form) {
  static const auto handle = dispatcher::find<OnScores<Tensor>>("posembed::alibi_softmax");
  return call_on_scores(handle, scores, slopes, at, form);
}

inline void call_softmax_in_place(const Tensor& scores, const Tensor& slopes, const Places& at,
                                  const Form& form) {
  static const auto handle = dispatcher::find<OnScores<void>>("posembed::alibi_softmax_");
  call_on_scores(handle, scores, slopes, at, form);
}

/// sides: how many slopes each head has; 0: their gradient is not asked for, and comes empty.
inline std::tuple<Tensor, Tensor> call_softmax_backward(const Tensor& grad, const Tensor& weights,
                                                        const Places& at, const Form& form,
                                                        int64_t sides, MaybeType dtype) {
  static const auto handle = dispatcher::find<SoftmaxBackward>("posembed::alibi_softmax_backward");
  return handle.call(grad, weights, at.query_positions, at.key_positions, at.cu_seqlens,
                     at.attention_mask, form.query_offset, form.causal, form.hide, form.scale,
                     sides, dtype);
}

template <typename... Given>
Tensor call_lse_correction(Given&&... given) {
  static const auto handle = dispatcher::find<LseCorrection>("posembed::alibi_lse_correction");
  return handle.call(std::forward<Given>(given)...);
}

}  // namespace posembed::alibi
