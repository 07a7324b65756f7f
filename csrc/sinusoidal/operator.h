// C++ calls of the sinusoidal operators, through the dispatcher as in Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <utility>

#include "dispatcher/call.h"

namespace posembed::sinusoidal {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using MaybeType = std::optional<at::ScalarType>;
using Text = std::string_view;

using AddOperator = Tensor(const Tensor&, const MaybeTensor&, const MaybeTensor&, Text,
                           c10::SymInt);
using EncodeOperator = Tensor(const Tensor&, const MaybeTensor&, Text, int64_t, MaybeType);
using ShiftMatrix = Tensor(double, Text);

template <typename... Given>
Tensor call_add(Given&&... given) {
  static const auto handle = dispatcher::find<AddOperator>("posembed::sinusoidal_add");
  return handle.call(std::forward<Given>(given)...);
}

template <typename... Given>
Tensor call_encode(Given&&... given) {
  static const auto handle = dispatcher::find<EncodeOperator>("posembed::sinusoidal_encode");
  return handle.call(std::forward<Given>(given)...);
}

inline Tensor call_shift_matrix(double distance, Text spec) {
  static const auto handle = dispatcher::find<ShiftMatrix>("posembed::sinusoidal_shift_matrix");
  return handle.call(distance, spec);
}

inline Tensor call_permutation(Text spec, Text other) {
  static const auto handle =
      dispatcher::find<Tensor(Text, Text)>("posembed::sinusoidal_permutation");
  return handle.call(spec, other);
}

}  // namespace posembed::sinusoidal
