// C++ calls of the sinusoidal operators, through the dispatcher as in Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "dispatcher/call.h"
#include "dispatcher/spread.h"

namespace posembed::sinusoidal {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using MaybeType = std::optional<at::ScalarType>;
using Text = std::string_view;

/// Arguments of sinusoidal_add, in the order of its schema. Refers to the text, which must outlive
/// it.
struct Addition {
  Text spec;                             // SinusoidalSpec::to_json()
  MaybeTensor positions = std::nullopt;  // [seq] or [batch, seq]; none: offset, offset + 1, …
  Offset offset = 0;                     // a number
  MaybeTensor scale = std::nullopt;      // floating, one element

  template <typename Self>
  static auto fields(Self& self) {
    return std::tie(self.spec, self.positions, self.offset, self.scale);
  }
};

using Add = dispatcher::Spread<Addition, Tensor(const Tensor&)>;

inline Tensor call_add(const Tensor& x, const Addition& addition) {
  static const auto handle = dispatcher::find<Add::Signature>("posembed::sinusoidal_add");
  return Add::call(handle, x, addition);
}

/// Arguments of sinusoidal_encode, in the order of its schema. Refers to the text.
struct Encoding {
  Tensor positions;  // int32, int64 or floating [...]
  Text spec;
  MaybeTensor scale = std::nullopt;
  int64_t order = 0;  // of the derivative by positions

  template <typename Self>
  static auto fields(Self& self) {
    return std::tie(self.positions, self.spec, self.scale, self.order);
  }
};

using Encode = dispatcher::Spread<Encoding, Tensor(), MaybeType>;

inline Tensor call_encode(const Encoding& encoding, MaybeType dtype) {
  static const auto handle = dispatcher::find<Encode::Signature>("posembed::sinusoidal_encode");
  return Encode::call(handle, encoding, dtype);
}

using ShiftMatrix = Tensor(double, Text);

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
