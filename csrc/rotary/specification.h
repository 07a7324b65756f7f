// Specifications as operators need them: parsed from text, checked, with frequencies as turns.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/double_double.h"
#include "core/turn.h"
#include "dispatcher/first_use.h"
#include "posembed/rotary_specification.h"

namespace posembed::rotary {

/// A specification ready for the kernel.
struct Specification {
  /// Raises c10::ValueError for text or numbers that are not a specification. A module with heads
  /// writes them in front: "heads 8 2 {…}".
  explicit Specification(std::string_view text);

  RotarySpec spec;
  int64_t heads = 0, key_heads = 0;             // of the model; 0: any
  std::vector<core::DoubleDouble> frequencies;  // [rotary_dim / 2], radians per position
  std::vector<core::Turn64> turns;              // the same as fractions of a turn
  std::vector<core::Turn128> wide_turns;
  double attention_factor = 1.0;      // multiplies rotated pairs
  std::vector<uint8_t> axis_of_pair;  // empty: positions have one axis
  std::vector<int64_t> windows;       // see Arguments; empty: pairs are not within axes
  int64_t axes = 1;                   // of positions, at most
  int64_t used_axes = 1;              // of positions, at least
  std::vector<double> decay;          // xPos: see Arguments; empty otherwise
  double decay_center = 0.0;
  std::string for_keys;  // the text for rotating keys without a query
  // For numerics other than exact, computed at first use: see numerics.h.
  dispatcher::FirstUseMember<std::vector<float>> float32_frequencies;  // [rotary_dim / 2]
};

using SpecificationPointer = std::shared_ptr<const Specification>;

/// Parses a specification's JSON text; keeps the latest texts. Raises c10::ValueError for text or
/// numbers that are not a specification.
SpecificationPointer specification(std::string_view text);

}  // namespace posembed::rotary
