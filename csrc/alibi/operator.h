// How C++ code calls the ALiBi operators: through the dispatcher, as Python does.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <utility>

#include "dispatcher/call.h"

namespace posembed::alibi {

using at::Tensor;
using Text = std::string_view;
using MaybeOffset = std::optional<c10::SymInt>;
using MaybeType = std::optional<at::ScalarType>;

using SlopesOperator = Tensor(int64_t, Text, double, std::optional<int64_t>, int64_t,
                              at::ArrayRef<double>, std::optional<at::Device>);
using Bias = Tensor(const Tensor&, c10::SymInt, c10::SymInt, MaybeOffset, bool, bool, MaybeType);
using BiasBackward = Tensor(const Tensor&, MaybeOffset, bool, bool, MaybeType);
using Add = Tensor(const Tensor&, const Tensor&, MaybeOffset, bool, bool);
using AddInPlace = void(const Tensor&, const Tensor&, MaybeOffset, bool, bool);

template <typename... Given>
Tensor call_slopes(Given&&... given) {
  static const auto handle = dispatcher::find<SlopesOperator>("posembed::alibi_slopes");
  return handle.call(std::forward<Given>(given)...);
}

template <typename... Given>
Tensor call_bias(Given&&... given) {
  static const auto handle = dispatcher::find<Bias>("posembed::alibi_bias");
  return handle.call(std::forward<Given>(given)...);
}

template <typename... Given>
Tensor call_bias_backward(Given&&... given) {
  static const auto handle = dispatcher::find<BiasBackward>("posembed::alibi_bias_backward");
  return handle.call(std::forward<Given>(given)...);
}

template <typename... Given>
Tensor call_add(Given&&... given) {
  static const auto handle = dispatcher::find<Add>("posembed::alibi_add");
  return handle.call(std::forward<Given>(given)...);
}

template <typename... Given>
void call_add_in_place(Given&&... given) {
  static const auto handle = dispatcher::find<AddInPlace>("posembed::alibi_add_");
  handle.call(std::forward<Given>(given)...);
}

}  // namespace posembed::alibi
