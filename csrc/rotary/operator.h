// How C++ code calls the rotary operators: through the dispatcher, as Python does.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "dispatcher/call.h"

namespace posembed::rotary {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Text = std::string_view;

using Rotary = Tensor(const Tensor&, const MaybeTensor&, Text, Text, c10::SymInt, bool, bool);
using RotaryPair = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const MaybeTensor&,
                                              Text, Text, c10::SymInt, bool, bool);
using RotaryInPlace = void(const Tensor&, const MaybeTensor&, Text, Text, c10::SymInt, bool);
using RotaryOut = void(const Tensor&, const Tensor&, const MaybeTensor&, Text, Text, c10::SymInt,
                       bool);
using RotaryPairOut = void(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                           const MaybeTensor&, Text, Text, c10::SymInt, bool);
using RotaryPairInPlace = void(const Tensor&, const Tensor&, const MaybeTensor&, Text, Text,
                               c10::SymInt, bool);

template <typename... Given>
Tensor call_rotary(Given&&... given) {
  static const auto handle = dispatcher::find<Rotary>("posembed::rotary");
  return handle.call(std::forward<Given>(given)...);
}

template <typename... Given>
std::tuple<Tensor, Tensor> call_rotary_pair(Given&&... given) {
  static const auto handle = dispatcher::find<RotaryPair>("posembed::rotary_pair");
  return handle.call(std::forward<Given>(given)...);
}

template <typename... Given>
void call_rotary_in_place(Given&&... given) {
  static const auto handle = dispatcher::find<RotaryInPlace>("posembed::rotary_");
  handle.call(std::forward<Given>(given)...);
}

template <typename... Given>
void call_rotary_pair_in_place(Given&&... given) {
  static const auto handle = dispatcher::find<RotaryPairInPlace>("posembed::rotary_pair_");
  handle.call(std::forward<Given>(given)...);
}

template <typename... Given>
void call_rotary_out(Given&&... given) {
  static const auto handle = dispatcher::find<RotaryOut>("posembed::rotary_out");
  handle.call(std::forward<Given>(given)...);
}

template <typename... Given>
void call_rotary_pair_out(Given&&... given) {
  static const auto handle = dispatcher::find<RotaryPairOut>("posembed::rotary_pair_out");
  handle.call(std::forward<Given>(given)...);
}

inline Tensor call_rotary_frequencies(Text spec) {
  static const auto handle = dispatcher::find<Tensor(Text)>("posembed::rotary_frequencies");
  return handle.call(spec);
}

}  // namespace posembed::rotary
