// Positions with several axes: M-RoPE in text models, rows and columns in vision towers.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "configuration/keys.h"
#include "posembed/rotary_specification.h"

namespace posembed::configuration {

/// Alternating axes as in Qwen3-VL: the first axis gets all pairs that no later axis takes.
Sections in_turns(std::vector<int64_t> sizes, int64_t pairs);

/// M-RoPE of a text model: alternating axes or contiguous ones, depending on the model.
std::optional<Sections> sections_of_text(Keys& rope, const std::string& model_type, int64_t pairs);

/// Sets the axes of a vision tower for which conventions::is_axial() is true. In most towers, each
/// axis has the whole series of frequencies.
void set_axes_of_tower(RotarySpec& spec, Keys& config, const std::string& model_type);

/// Gemma-4's tower: each axis has its own window, one after the other, and pairs its halves.
/// `axis`: the window of "height" or "width" alone.
void set_window_of_axis(RotarySpec& spec, const std::optional<std::string>& axis);

}  // namespace posembed::configuration
