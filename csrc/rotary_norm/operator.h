// C++ calls of the QK-norm operators, through the dispatcher as in Python. Their common arguments
// become one struct.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "dispatcher/call.h"
#include "dispatcher/spread.h"
#include "posembed/rotary_norm.h"
#include "rotary/operator.h"

namespace posembed::rotary_norm {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Text = std::string_view;

/// Arguments of the operators, in the order of their schemas. Refers to the text, which must
/// outlive it.
struct Call {
  Tensor query;            // in `options.layout()`
  Tensor key;              // the same with any number of heads
  Tensor query_weight;     // [head_dim]
  Tensor key_weight;       // [head_dim]
  Text spec;               // RotarySpec::to_json()
  NormRotaryCall options;  // whose offset is a number

  template <typename Self>
  static auto fields(Self& self) {
    auto& options = self.options;
    return std::tie(self.query, self.key, self.query_weight, self.key_weight, self.spec,
                    options.positions(), options.layout(), options.offset(), options.eps(),
                    options.weight_offset());
  }
};

/// The rotation of a call, which must outlive it.
inline rotary::Rotation rotation_of(const Call& call, bool transpose = false) {
  const NormRotaryCall& options = call.options;
  RotaryCall rotation;
  rotation.positions(options.positions()).offset(options.offset()).layout(options.layout());
  return {call.spec, std::move(rotation), transpose};
}

/// A tensor for query and one for key.
using Two = std::tuple<Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <typename Result, typename... Tensors>
using Spread = dispatcher::Spread<Call, Result(Tensors...)>;

using NormRotaryOperator = Spread<Two>;
using NormRotaryForwardOperator = Spread<Four>;
using NormRotaryBackwardOperator =
    Spread<Four, const Tensor&, const Tensor&, const Tensor&, const Tensor&>;
using NormRotaryInPlaceOperator = Spread<void>;

inline Two call_norm_rotary(const Call& call) {
  static const auto handle =
      dispatcher::find<NormRotaryOperator::Signature>("posembed::norm_rotary");
  return NormRotaryOperator::call(handle, call);
}

/// Query and key, and the rstd of each for the backward pass, [batch, seq, heads].
inline Four call_norm_rotary_forward(const Call& call) {
  static const auto handle =
      dispatcher::find<NormRotaryForwardOperator::Signature>("posembed::norm_rotary_forward");
  return NormRotaryForwardOperator::call(handle, call);
}

/// Gradients of query, key and their weights, from those of the results.
inline Four call_norm_rotary_backward(const Tensor& query_gradient, const Tensor& key_gradient,
                                      const Tensor& query_rstd, const Tensor& key_rstd,
                                      const Call& call) {
  static const auto handle =
      dispatcher::find<NormRotaryBackwardOperator::Signature>("posembed::norm_rotary_backward");
  return NormRotaryBackwardOperator::call(handle, query_gradient, key_gradient, query_rstd,
                                          key_rstd, call);
}

inline void call_norm_rotary_in_place(const Call& call) {
  static const auto handle =
      dispatcher::find<NormRotaryInPlaceOperator::Signature>("posembed::norm_rotary_");
  NormRotaryInPlaceOperator::call(handle, call);
}

}  // namespace posembed::rotary_norm
