// Specifications as operators need them: parsed from text, checked, with frequencies as turns.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "core/double_double.h"
#include "core/turn.h"
#include "posembed/sinusoidal.h"
#include "sinusoidal/sinusoid.h"

namespace posembed::sinusoidal {

/// A specification ready for the kernel.
struct Specification {
  /// Raises c10::ValueError for text or numbers that are not a specification.
  explicit Specification(std::string_view text);

  SinusoidalSpec spec;
  Layout layout;
  std::vector<core::DoubleDouble> frequencies;  // [pairs], radians per position
  std::vector<core::Turn64> turns;              // the same as fractions of a turn
  std::vector<core::Turn128> wide_turns;
  int64_t first = 0;  // see Sinusoid

  /// The numbers that kernels read; points into this specification.
  Sinusoid sinusoid(int64_t order = 0) const;
};

using SpecificationPointer = std::shared_ptr<const Specification>;

/// Parses a specification's JSON text; keeps the latest texts. Raises c10::ValueError for text or
/// numbers that are not a specification.
SpecificationPointer specification(std::string_view text);

}  // namespace posembed::sinusoidal
