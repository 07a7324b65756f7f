// Positions with several axes: M-RoPE of text models, rows and columns of vision towers.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "configuration/keys.h"
#include "posembed/rotary_specification.h"

namespace posembed::configuration {

/// Qwen3-VL's: pairs that no later axis takes are the first axis's, however many there are.
Sections in_turns(std::vector<int64_t> sizes, int64_t pairs);

/// M-RoPE of a text model: in turns or one axis after the other, as the model has it.
std::optional<Sections> sections_of_text(Keys& rope, const std::string& model_type, int64_t pairs);

/// Sets the axes of a vision tower, which conventions::is_axial() knows: mostly each axis has the
/// whole series of frequencies.
void set_axes_of_tower(RotarySpec& spec, Keys& config, const std::string& model_type);

/// Gemma-4's tower: each axis pairs halves of a window of its own, one after the other.
void set_window_of_axis(RotarySpec& spec, const std::optional<std::string>& axis);

}  // namespace posembed::configuration
