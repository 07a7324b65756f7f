// How C++ code calls the QK-norm operators: through the dispatcher, as Python does. Their common
// arguments become one struct.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "dispatcher/call.h"
#include "rotary/operator.h"

namespace posembed::rotary_norm {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Text = std::string_view;

/// Arguments of the operators, in the order of their schemas.
struct Call {
  Tensor query;           // in `layout`
  Tensor key;             // the same with any number of heads
  Tensor query_weight;    // [head_dim]
  Tensor key_weight;      // [head_dim]
  MaybeTensor positions;  // int [seq], [batch, seq] or [tokens]; none: offset, offset + 1, …
  std::string spec;       // RotarySpec::to_json()
  std::string layout = "bshd";
  c10::SymInt offset = 0;
  double eps = 1e-6;
  double weight_offset = 0.0;  // added to the weights
};

/// The rotation of a call. Only references to the call.
inline rotary::Rotation rotation_of(const Call& call, bool transpose = false) {
  static const MaybeTensor none;
  return {call.positions, none, none, call.spec, call.layout, call.offset, false, transpose};
}

/// Turns a kernel that takes the struct into one with a parameter for each of its fields; further
/// arguments come first.
template <auto kernel>
struct Spread;

template <typename Result, typename... Leading, Result (*kernel)(const Call&, Leading...)>
struct Spread<kernel> {
  static Result call(Leading... leading, const Tensor& query, const Tensor& key,
                     const Tensor& query_weight, const Tensor& key_weight,
                     const MaybeTensor& positions, Text spec, Text layout, c10::SymInt offset,
                     double eps, double weight_offset) {
    return kernel({query, key, query_weight, key_weight, positions, std::string(spec),
                   std::string(layout), std::move(offset), eps, weight_offset},
                  leading...);
  }
};

template <typename Result, typename... Leading>
using Operator = Result(Leading..., const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                        const MaybeTensor&, Text, Text, c10::SymInt, double, double);

template <typename Handle, typename... Leading>
auto call_spread(const Handle& handle, const Call& call, const Leading&... leading) {
  return handle.call(leading..., call.query, call.key, call.query_weight, call.key_weight,
                     call.positions, call.spec, call.layout, call.offset, call.eps,
                     call.weight_offset);
}

/// Of query and of key.
using Two = std::tuple<Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

inline Two call_norm_rotary(const Call& call) {
  static const auto handle = dispatcher::find<Operator<Two>>("posembed::norm_rotary");
  return call_spread(handle, call);
}

/// Query and key, and the rstd of each for the backward pass, [batch, seq, heads].
inline Four call_norm_rotary_forward(const Call& call) {
  static const auto handle = dispatcher::find<Operator<Four>>("posembed::norm_rotary_forward");
  return call_spread(handle, call);
}

/// Gradients of query, key and their weights from those of the results.
inline Four call_norm_rotary_backward(const Call& call, const Tensor& query_gradient,
                                      const Tensor& key_gradient, const Tensor& query_rstd,
                                      const Tensor& key_rstd) {
  using Signature = Operator<Four, const Tensor&, const Tensor&, const Tensor&, const Tensor&>;
  static const auto handle = dispatcher::find<Signature>("posembed::norm_rotary_backward");
  return call_spread(handle, call, query_gradient, key_gradient, query_rstd, key_rstd);
}

inline void call_norm_rotary_in_place(const Call& call) {
  static const auto handle = dispatcher::find<Operator<void>>("posembed::norm_rotary_");
  call_spread(handle, call);
}

}  // namespace posembed::rotary_norm
