// Specifications as operators need them: parsed from text, checked, with frequencies as turns.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/double_double.h"
#include "core/turn.h"
#include "posembed/rotary_specification.h"

namespace posembed::rotary {

/// A specification ready for the kernel.
struct Specification {
  /// Raises c10::ValueError for text or numbers that are not a specification.
  explicit Specification(std::string_view text);

  RotarySpec spec;
  std::vector<core::DoubleDouble> frequencies;  // [rotary_dim / 2], radians per position
  std::vector<core::Turn64> turns;              // the same as fractions of a turn
  std::vector<core::Turn128> wide_turns;
  double attention_factor = 1.0;      // multiplies rotated pairs
  std::vector<uint8_t> axis_of_pair;  // empty: positions have one axis
  int64_t axes = 1;                   // of positions, at most
  int64_t used_axes = 1;              // of positions, at least
  std::vector<double> decay;          // xPos: see Arguments; empty otherwise
  double decay_center = 0.0;
  std::string for_keys;  // the text for rotating keys without a query
};

/// Parses a specification's JSON text, once per text; the result exists as long as the process.
/// Raises c10::ValueError for text or numbers that are not a specification.
const Specification& specification(std::string_view text);

}  // namespace posembed::rotary
