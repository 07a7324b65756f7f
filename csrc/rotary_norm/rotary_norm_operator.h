// The QK-norm operators, as C++ code calls them and as their kernels are registered. Their common
// arguments form one struct.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "dispatcher/operator.h"
#include "posembed/rotary_norm.h"
#include "posembed/rotary_tables.h"
#include "rotary/rotary_operator.h"
#include "rotary_norm/rotary_norm.h"

namespace posembed::rotary_norm {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Text = std::string_view;

/// Arguments of the operators, in the order of their schemas. Refers to the text, which must
/// outlive it.
struct Call {
  Tensor query;              // in `options.layout()`
  Tensor key;                // the same with any number of heads
  MaybeTensor query_weight;  // [head_dim], or [heads * head_dim] if options.all_heads()
  MaybeTensor key_weight;    // the same
  Text spec;                 // RotarySpec::to_json()
  NormRotaryCall options;    // whose offset is a number

  POSEMBED_FIELDS(self.query, self.key, self.query_weight, self.key_weight, self.spec,
                  self.options.positions(), self.options.layout(), self.options.offset(),
                  self.options.eps(), self.options.weight_offset(), self.options.centred(),
                  self.options.all_heads(), self.options.query_bias(), self.options.key_bias(),
                  self.options.cos(), self.options.sin(), self.options.numerics(),
                  self.options.round_before_weight())
};

/// The rotation of a call, which must outlive it.
inline rotary::Rotation rotation_of(const Call& call, bool transpose = false) {
  const NormRotaryCall& options = call.options;
  RotaryCall rotation;
  rotation.positions(options.positions()).offset(options.offset()).layout(options.layout());
  return {call.spec, std::move(rotation), transpose};
}

/// Whether a call is more than RMSNorm of each head and exact angles: its gradients are then a
/// chain of operators.
inline bool is_general(const Call& call) {
  const NormRotaryCall& options = call.options;
  return options.centred() || options.all_heads() || options.cos().has_value();
}

/// A tensor for query and one for key.
using Two = std::tuple<Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <typename Result, typename... Tensors>
using Operator = dispatcher::Operator<Result(Tensors...), Call>;

inline const Operator<Two> norm_rotary{"norm_rotary"};
inline const Operator<void> norm_rotary_{"norm_rotary_"};

/// Query and key, and the rstd of each for the backward pass, [batch, seq, heads]. Not for calls
/// that are general.
inline const Operator<Four> norm_rotary_forward{"norm_rotary_forward"};

/// Gradients of query, key and their weights, from the gradients of the results and the rstd of
/// query and key. The gradient of a weight that is not given is empty. Not for general calls.
inline const Operator<Four, const Tensor&, const Tensor&, const Tensor&, const Tensor&>
    norm_rotary_backward{"norm_rotary_backward"};

/// Arguments of the operators on packed projections, after the tensors.
struct PackedCall : rotary::PackedHeads {
  Tensor qkv;
  Call call;  // without query and key

  POSEMBED_FIELDS(self.qkv, self.heads, self.key_heads, self.order, self.call.query_weight,
                  self.call.key_weight, self.call.spec, self.call.options.positions(),
                  self.call.options.layout(), self.call.options.offset(), self.call.options.eps(),
                  self.call.options.weight_offset(), self.call.options.centred(),
                  self.call.options.all_heads(), self.call.options.query_bias(),
                  self.call.options.key_bias(), self.call.options.cos(), self.call.options.sin(),
                  self.call.options.numerics(), self.call.options.round_before_weight())
};

using Three = rotary::Three;

template <typename Result, typename... Tensors>
using PackedOperator = dispatcher::Operator<Result(Tensors...), PackedCall>;

/// Query and key of a packed projection, and a view of its value.
inline const PackedOperator<Three> norm_rotary_packed{"norm_rotary_packed"};
inline const PackedOperator<void> norm_rotary_packed_{"norm_rotary_packed_"};

/// Gradients of the projection and of the weights, from those of query, key and value, and the
/// rstd of query and key. Not for general calls.
inline const PackedOperator<Three, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                            const Tensor&>
    norm_rotary_packed_backward{"norm_rotary_packed_backward"};

// -------------------------------------------------------------------------- checks and preparation

/// The checks of weights, biases and the norm's numbers, which need no values.
void check_parameters(const Call& call);

/// Contiguous weights and biases, which the kernel's arguments point to.
struct Parameters {
  Tensor tensor[4];
};

/// Sets the norm in arguments that have the rotation.
void set_norm(const Call& call, Parameters* parameters, Arguments* arguments);

}  // namespace posembed::rotary_norm
