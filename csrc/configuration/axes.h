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
/// @param axes  of the catalogue's entry
std::optional<Sections> sections_of_text(Keys& rope, const json& axes, int64_t pairs);

/// Sets the axes of a vision tower. In most towers, each axis has the whole series of frequencies.
/// @param grid  of the catalogue's entry
void set_axes_of_tower(RotarySpec& spec, Keys& config, const std::string& grid);

/// Gemma-4's tower: each axis has its own window, one after the other, and pairs its halves.
/// `axis`: the window of "height" or "width" alone.
void set_window_of_axis(RotarySpec& spec, const std::optional<std::string>& axis);

}  // namespace posembed::configuration
