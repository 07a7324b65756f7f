// A specification for positions with several axes, from one for each axis.
#include <c10/util/Exception.h>

#include <optional>

#include "rotary/scaling.h"

namespace posembed {
namespace {

/// The scaling that a window of restarting series may have as a whole.
bool is_shared(const RotaryScaling& scaling) {
  return std::holds_alternative<std::monostate>(scaling) ||
         std::holds_alternative<LinearScaling>(scaling);
}

/// `axis` with the head and the base of `first`, and without what axes may differ in.
std::string common_text(RotarySpec axis) {
  axis.head_dim = axis.rotary_dim = 0;
  axis.base = 1.0;
  axis.scaling = {};
  axis.custom_frequencies = std::nullopt;
  axis.custom_attention_factor = std::nullopt;
  return axis.to_json();
}

void check_axis(const RotarySpec& axis, const RotarySpec& first) {
  axis.check();
  TORCH_CHECK_VALUE(axis.rotary_dim == axis.head_dim && !axis.sections.has_value(),
                    "axes: expected specifications that rotate a whole head by one axis, got ",
                    axis.describe());
  TORCH_CHECK_VALUE(
      !axis.is_dynamic() && !std::holds_alternative<XPosScaling>(axis.scaling),
      "axes: expected frequencies that do not depend on the length, and no xPos, got ",
      axis.describe());
  TORCH_CHECK_VALUE(common_text(axis) == common_text(first),
                    "axes: expected the same interleaved, reverse and numerics, got ",
                    first.describe(), " and ", axis.describe());
  TORCH_CHECK_VALUE(axis.attention_factor() == first.attention_factor(),
                    "axes: expected the same attention factor, got ", first.attention_factor(),
                    " and ", axis.attention_factor());
}

/// Whether one base and one scaling describe all axes.
bool is_uniform(const std::vector<RotarySpec>& axes) {
  for (const RotarySpec& axis : axes) {
    RotarySpec same = axis;
    same.head_dim = same.rotary_dim = axes[0].head_dim;
    if (same != axes[0] || axis.custom_frequencies.has_value()) return false;
  }
  return is_shared(axes[0].scaling);
}

}  // namespace

RotarySpec RotarySpec::axial(const std::vector<RotarySpec>& axes, bool within_axes) {
  TORCH_CHECK_VALUE(!axes.empty(), "axes: expected at least one specification, got none");
  std::vector<int64_t> sizes;
  std::vector<double> frequencies;
  RotarySpec result(0);
  for (const RotarySpec& axis : axes) {
    check_axis(axis, axes[0]);
    result.head_dim += axis.head_dim;
    sizes.push_back(axis.rotary_dim / 2);
    for (const core::DoubleDouble& each : rotary::scaled(axis).frequencies) {
      frequencies.push_back(each.high);
    }
  }
  if (axes.size() == 1) return axes[0];
  result.rotary_dim = result.head_dim;
  result.interleaved = axes[0].interleaved;
  result.reverse = axes[0].reverse;
  result.numerics = axes[0].numerics;
  const bool uniform = is_uniform(axes);
  result.sections = Sections::of(sizes, false, uniform);
  result.sections->within_axes = within_axes && !result.interleaved;
  if (uniform) {
    result.base = axes[0].base;
    result.scaling = axes[0].scaling;
  } else {
    result.custom_frequencies = std::move(frequencies);
    const double factor = axes[0].attention_factor();
    if (factor != 1.0) result.custom_attention_factor = factor;
  }
  result.check();
  return result;
}

}  // namespace posembed
