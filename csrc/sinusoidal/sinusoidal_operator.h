// The sinusoidal operators, as C++ code calls them and as their kernels are registered.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "dispatcher/operator.h"

namespace posembed::sinusoidal {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using MaybeType = std::optional<at::ScalarType>;
using Text = std::string_view;

/// Arguments of sinusoidal_add, in the order of its schema. Refers to the text, which must outlive
/// it.
struct Addition {
  Text spec;  // SinusoidalSpec::to_json()
  // [seq] or [batch, seq]; none: offset, offset + 1, …; several axes: [axes, batch or 1, seq]
  MaybeTensor positions = std::nullopt;
  Offset offset = 0;                 // a number
  MaybeTensor scale = std::nullopt;  // floating, one element

  POSEMBED_FIELDS(self.spec, self.positions, self.offset, self.scale)
};

inline const dispatcher::Operator<Tensor(const Tensor&), Addition> sinusoidal_add{"sinusoidal_add"};

/// Arguments of sinusoidal_encode, in the order of its schema. Refers to the text.
struct Encoding {
  Tensor positions;  // int32, int64 or floating [...]
  Text spec;         // of one axis
  MaybeTensor scale = std::nullopt;
  int64_t order = 0;  // of the derivative by positions

  POSEMBED_FIELDS(self.positions, self.spec, self.scale, self.order)
};

/// The last argument is the dtype of the result.
inline const dispatcher::Operator<Tensor(), Encoding, MaybeType> sinusoidal_encode{
    "sinusoidal_encode"};

/// The positions of a grid's cells, on the device of a tensor: that tensor, specification, sizes,
/// mask.
inline const dispatcher::Operator<Tensor(const Tensor&, Text, c10::SymIntArrayRef,
                                         const MaybeTensor&)>
    sinusoidal_grid_positions{"sinusoidal_grid_positions"};

/// The matrix that moves encodings by a distance.
inline const dispatcher::Operator<Tensor(double, Text)> sinusoidal_shift_matrix{
    "sinusoidal_shift_matrix"};

/// The column of the first specification that equals each column of the second.
inline const dispatcher::Operator<Tensor(Text, Text)> sinusoidal_permutation{
    "sinusoidal_permutation"};

}  // namespace posembed::sinusoidal
