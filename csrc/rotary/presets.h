// Rotations of image and video models by name: see RotarySpec::from_preset. rotary_presets.json has
// their numbers, each with its source.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "posembed/rotary_specification.h"

namespace posembed::rotary {

/// What a preset leaves open, and a model's configuration states.
struct PresetNumbers {
  std::optional<int64_t> head_dim = std::nullopt;
  std::optional<std::vector<int64_t>> axes = std::nullopt;  ///< components of each axis
  std::optional<double> base = std::nullopt;
  std::optional<std::vector<double>> ntk = std::nullopt;  ///< NtkScaling of each axis
};

/// The specification of a preset. Throws c10::ValueError as RotarySpec::from_preset.
RotarySpec preset(const std::string& name, const PresetNumbers& stated);

}  // namespace posembed::rotary
