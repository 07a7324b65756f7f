// The sinusoidal operators, as C++ code calls them and as their kernels are registered, and
// specifications as they need them: parsed from text, checked, with frequencies as turns.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "core/double_double.h"
#include "core/turn.h"
#include "dispatcher/operator.h"
#include "posembed/sinusoidal.h"
#include "sinusoidal/sinusoidal.h"

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

// ---------------------------------------------------------------------------------- specifications

struct Specification;

/// One of the blocks of columns of an encoding with several axes.
struct Part {
  int64_t axis = 0;    // whose positions it encodes
  int64_t column = 0;  // its first
  std::shared_ptr<const Specification> specification;

  const SinusoidalSpec& spec() const;
  std::string text() const;
};

/// The positions of a grid's cells; see SinusoidalSpec.
struct GridRule {
  double start = 0.0;
  double length = 0.0;
  double epsilon = 0.0;  // added to the number of cells that divides the length
  int64_t max_size = 0;
  std::vector<double> interpolation_scale;  // one for each axis
};

/// A specification ready for the kernel. With several axes, its parts are.
struct Specification {
  /// Raises c10::ValueError for text or numbers that are not a specification.
  explicit Specification(std::string_view text);
  explicit Specification(const SinusoidalSpec& spec);

  SinusoidalSpec spec;
  Layout layout;
  std::vector<core::DoubleDouble> frequencies;  // [pairs], radians per position
  std::vector<core::Turn64> turns;              // the same as fractions of a turn
  std::vector<core::Turn128> wide_turns;
  int64_t first = 0;        // see Sinusoid
  std::vector<Part> parts;  // empty with one axis
  GridRule grid;

  /// The numbers that kernels read; points into this specification.
  Sinusoid sinusoid(int64_t order = 0) const;
};

using SpecificationPointer = std::shared_ptr<const Specification>;

/// Parses a specification's JSON text; keeps the latest texts. Raises c10::ValueError for text or
/// numbers that are not a specification.
SpecificationPointer specification(std::string_view text);

/// The same; raises c10::ValueError if it has several axes.
SpecificationPointer specification_of_one_axis(std::string_view text);

}  // namespace posembed::sinusoidal
