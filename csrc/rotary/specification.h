// What the operator reads out of a specification's text: numbers checked, frequencies as turns.
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
  RotarySpec spec;
  std::vector<core::DoubleDouble> frequencies;  // [rotary_dim / 2], radians per position
  std::vector<core::Turn64> turns;              // the same as fractions of a turn
  std::vector<core::Turn128> wide_turns;
  double attention_factor;            // what rotated pairs are multiplied by
  std::vector<uint8_t> axis_of_pair;  // empty: positions have one axis
  int64_t axes;                       // of positions: 1 without sections
  std::vector<double> decay;          // xPos: see Arguments; empty otherwise
  double decay_center;
  std::string for_keys;  // the text that rotates a tensor alone as keys
};

/// Reads a specification's JSON text, once for each text; the result lives as long as the process.
/// Raises c10::ValueError for text or numbers that are not a specification.
const Specification& specification(std::string_view text);

}  // namespace posembed::rotary
