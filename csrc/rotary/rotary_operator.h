// The rotary operators, as C++ code calls them and as their kernels are registered. The arguments
// at the end of all schemas form one struct, Rotation.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "dispatcher/operator.h"
#include "posembed/rotary.h"

namespace posembed::dispatcher {

template <>
struct EnumArgument<Layout> {
  static constexpr const char* argument = "layout";
  static constexpr Layout values[] = {Layout::bshd, Layout::bhsd, Layout::sbhd, Layout::thd};
};

template <>
struct EnumArgument<Numerics> {
  static constexpr const char* argument = "numerics";
  static constexpr Numerics values[] = {Numerics::exact, Numerics::float32,
                                        Numerics::float32_product, Numerics::float32_rounded_table,
                                        Numerics::float32_polar};
};

template <>
struct EnumArgument<PackedOrder> {
  static constexpr const char* argument = "order";
  static constexpr PackedOrder values[] = {PackedOrder::blocks, PackedOrder::groups};
};

}  // namespace posembed::dispatcher

namespace posembed::rotary {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Text = std::string_view;

/// The arguments that define a rotation. Refers to the text, which must outlive it.
struct Rotation {
  Text spec;        // RotarySpec::to_json()
  RotaryCall call;  // whose offset is a number
  bool transpose = false;

  POSEMBED_FIELDS(self.spec, self.call.positions(), self.call.layout(), self.call.offset(),
                  self.call.inverse(), self.call.cu_seqlens(), self.call.frequencies(),
                  self.transpose)
};

/// Operators that take a Rotation after the tensors.
template <typename Result, typename... Tensors>
using Operator = dispatcher::Operator<Result(Tensors...), Rotation>;

using Two = std::tuple<Tensor, Tensor>;

inline const Operator<Tensor, const Tensor&> rotary{"rotary"};
inline const Operator<Two, const Tensor&, const Tensor&> rotary_pair{"rotary_pair"};

/// In place.
inline const Operator<void, const Tensor&> rotary_{"rotary_"};
inline const Operator<void, const Tensor&, const Tensor&> rotary_pair_{"rotary_pair_"};

/// Into given memory, which comes first.
inline const Operator<void, const Tensor&, const Tensor&> rotary_out{"rotary_out"};
inline const Operator<void, const Tensor&, const Tensor&, const Tensor&, const Tensor&>
    rotary_pair_out{"rotary_pair_out"};

/// The tangent of a result of a rotation, for the tangent of its frequencies, which stands in their
/// place.
inline const Operator<Tensor, const Tensor&> rotary_tangent{"rotary_tangent"};

/// The gradient of frequencies, in their shape and dtype, from the gradient of query and
/// query.
inline const Operator<Tensor, const Tensor&, const Tensor&> rotary_frequencies_backward{
    "rotary_frequencies_backward"};

/// The heads of a packed projection.
struct PackedHeads {
  int64_t heads = 0, key_heads = 0;
  PackedOrder order = PackedOrder::blocks;

  int64_t groups() const { return order == PackedOrder::groups ? key_heads : 1; }
};

inline PackedHeads heads_of(const Packing& packing) {
  return {packing.heads(), packing.key_heads().value_or(packing.heads()), packing.order()};
}

/// Arguments of the operators on packed projections, after the tensors. Refers to the text.
struct PackedRotation : PackedHeads {
  Rotation rotation;

  POSEMBED_FIELDS(self.heads, self.key_heads, self.order, self.rotation.spec,
                  self.rotation.call.positions(), self.rotation.call.layout(),
                  self.rotation.call.offset(), self.rotation.call.inverse(),
                  self.rotation.call.cu_seqlens(), self.rotation.call.frequencies(),
                  self.rotation.transpose)
};

using Three = std::tuple<Tensor, Tensor, Tensor>;

template <typename Result, typename... Tensors>
using PackedOperator = dispatcher::Operator<Result(Tensors...), PackedRotation>;

/// Rotated query and key of a packed projection, and a view of its value.
inline const PackedOperator<Three, const Tensor&> rotary_packed{"rotary_packed"};

/// Without the value.
inline const PackedOperator<Two, const Tensor&> rotary_packed_pair{"rotary_packed_pair"};

/// In place.
inline const PackedOperator<void, const Tensor&> rotary_packed_{"rotary_packed_"};

/// The gradient of a packed projection from those of query, key and value.
inline const PackedOperator<Tensor, const Tensor&, const Tensor&, const Tensor&>
    rotary_packed_backward{"rotary_packed_backward"};

/// Moves rotated keys in place: key, old and new positions, the specification, the new one if it
/// differs, the layout, and frequencies.
inline const dispatcher::Operator<void(const Tensor&, const Tensor&, const Tensor&, Text,
                                       std::optional<Text>, Text, const MaybeTensor&)>
    rotary_rerotate_{"rotary_rerotate_"};

inline const dispatcher::Operator<Tensor(Text, std::optional<at::Device>)> rotary_frequencies{
    "rotary_frequencies"};

}  // namespace posembed::rotary
