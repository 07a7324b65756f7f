// C++ calls of the rotary operators, through the dispatcher as in Python. The arguments at the end
// of all schemas form one struct, Rotation.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "dispatcher/call.h"
#include "dispatcher/spread.h"
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

  template <typename Self>
  static auto fields(Self& self) {
    auto& call = self.call;
    return std::tie(self.spec, call.positions(), call.layout(), call.offset(), call.inverse(),
                    call.cu_seqlens(), call.frequencies(), self.transpose);
  }
};

/// Operators that take a Rotation after the tensors.
template <typename Result, typename... Tensors>
using Spread = dispatcher::Spread<Rotation, Result(Tensors...)>;

using Rotary = Spread<Tensor, const Tensor&>;
using RotaryPair = Spread<std::tuple<Tensor, Tensor>, const Tensor&, const Tensor&>;
using RotaryFrequenciesBackward = Spread<Tensor, const Tensor&, const Tensor&>;
using RotaryInPlace = Spread<void, const Tensor&>;
using RotaryPairInPlace = Spread<void, const Tensor&, const Tensor&>;
using RotaryOut = Spread<void, const Tensor&, const Tensor&>;
using RotaryPairOut = Spread<void, const Tensor&, const Tensor&, const Tensor&, const Tensor&>;

inline Tensor call_rotary(const Tensor& query, const Rotation& by) {
  static const auto handle = dispatcher::find<Rotary::Signature>("posembed::rotary");
  return Rotary::call(handle, query, by);
}

inline std::tuple<Tensor, Tensor> call_rotary_pair(const Tensor& query, const Tensor& key,
                                                   const Rotation& by) {
  static const auto handle = dispatcher::find<RotaryPair::Signature>("posembed::rotary_pair");
  return RotaryPair::call(handle, query, key, by);
}

inline void call_rotary_in_place(const Tensor& query, const Rotation& by) {
  static const auto handle = dispatcher::find<RotaryInPlace::Signature>("posembed::rotary_");
  RotaryInPlace::call(handle, query, by);
}

inline void call_rotary_pair_in_place(const Tensor& query, const Tensor& key, const Rotation& by) {
  static const auto handle =
      dispatcher::find<RotaryPairInPlace::Signature>("posembed::rotary_pair_");
  RotaryPairInPlace::call(handle, query, key, by);
}

/// The tangent of `rotated`, a result of a rotation, for the tangent `by.call.frequencies()` of its
/// frequencies.
inline Tensor call_rotary_tangent(const Tensor& rotated, const Rotation& by) {
  static const auto handle = dispatcher::find<Rotary::Signature>("posembed::rotary_tangent");
  return Rotary::call(handle, rotated, by);
}

/// The gradient of frequencies [rotary_dim / 2], in the dtype of `by.call.frequencies()`, from
/// `query` and the gradient of query.
inline Tensor call_rotary_frequencies_backward(const Tensor& gradient, const Tensor& query,
                                               const Rotation& by) {
  static const auto handle = dispatcher::find<RotaryFrequenciesBackward::Signature>(
      "posembed::rotary_frequencies_backward");
  return RotaryFrequenciesBackward::call(handle, gradient, query, by);
}

inline void call_rotary_out(const Tensor& out, const Tensor& query, const Rotation& by) {
  static const auto handle = dispatcher::find<RotaryOut::Signature>("posembed::rotary_out");
  RotaryOut::call(handle, out, query, by);
}

inline void call_rotary_pair_out(const Tensor& query_out, const Tensor& key_out,
                                 const Tensor& query, const Tensor& key, const Rotation& by) {
  static const auto handle =
      dispatcher::find<RotaryPairOut::Signature>("posembed::rotary_pair_out");
  RotaryPairOut::call(handle, query_out, key_out, query, key, by);
}

inline Tensor call_rotary_frequencies(Text spec) {
  using Signature = Tensor(Text, std::optional<at::Device>);
  static const auto handle = dispatcher::find<Signature>("posembed::rotary_frequencies");
  return handle.call(spec, std::nullopt);
}

}  // namespace posembed::rotary
