// Specifications as operators need them: parsed from text, checked, with frequencies as turns.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/double_double.h"
#include "core/turn.h"
#include "posembed/sinusoidal.h"
#include "sinusoidal/sinusoidal.h"

namespace posembed::sinusoidal {

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
