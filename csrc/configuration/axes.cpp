#include "configuration/axes.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "configuration/scalings.h"
#include "configuration/widths.h"

namespace posembed::configuration {
namespace {

constexpr double pi = 3.14159265358979323846;

using Axes = std::vector<int64_t>;

/// Repeats the axes `count` times.
Axes repeated(const Axes& axes, int64_t count) {
  Axes result;
  for (int64_t i = 0; i < count; ++i) result.insert(result.end(), axes.begin(), axes.end());
  return result;
}

Axes concatenated(Axes first, const Axes& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

/// Sections for positions with `count` axes, of which the last may rotate no pair.
Sections with_axes(Axes axis_of_pair, int64_t count) {
  Sections sections{std::move(axis_of_pair)};
  if (sections.used_axes() != count) sections.axes = count;
  return sections;
}

// ------------------------------------------------------------------------------------- text models

/// The configuration's sizes, or the model's defaults.
Axes sizes_or(const json& sizes, const json& otherwise) {
  return wholes("mrope_section", truthy(sizes) ? sizes : otherwise);
}

/// ERNIE-4.5-VL: height and width alternate over the faster pairs, and time has the slowest. Its
/// configuration gives the sections as (height, width, time).
Sections time_last(const Axes& sizes, int64_t pairs) {
  const bool fits = sizes.size() == 3 && sizes[0] == sizes[1] && sizes[0] >= 0 && sizes[2] >= 0 &&
                    std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) == pairs;
  TORCH_CHECK_VALUE(fits, "mrope_section: expected (n, n, t) of ", pairs, " pairs, got ",
                    repr(json(sizes)));
  return with_axes(concatenated(repeated({1, 2}, sizes[0]), repeated({0}, sizes[2])), 3);
}

Sections alternating(int64_t pairs) {
  Sections sections;
  for (int64_t pair = 0; pair < pairs; ++pair) sections.axis_of_pair.push_back(pair % 2);
  return sections;
}

// ----------------------------------------------------------------------------------- vision towers

/// EfficientLoFTR: all heads are rotated as one, and rows and columns alternate.
void set_whole_grid(RotarySpec& spec, Keys& config) {
  spec.head_dim = spec.rotary_dim = whole("hidden_size", config.need("hidden_size"));
  check_rotated(spec.rotary_dim);
  spec.sections = Sections{repeated({0, 1}, spec.head_dim / 4), true};
}

/// The size of an image or a patch along an axis, from one number or a list of one per axis.
int64_t size_along(Keys& config, const char* key, size_t axis) {
  const json sizes = config.need(key);
  if (!sizes.is_array()) return whole(key, sizes);
  TORCH_CHECK_VALUE(sizes.size() > axis, key, ": expected two numbers, got ", repr(sizes));
  return whole(key, sizes[axis]);
}

/// DINOv3: an image is two units wide, whatever its size, and the fastest pair turns twice across
/// it.
///
/// Patch i of n has the coordinate (2 i + 1 - n) / n. Here its position is the integer 2 i + 1, and
/// tokens that are not patches have position n on each axis. Scores are the same, because they
/// depend only on differences. The configuration's image_size determines n.
void set_normalised_grid(RotarySpec& spec, Keys& config) {
  const int64_t pairs = spec.head_dim / 4;
  std::vector<double> frequencies;
  for (size_t axis = 0; axis < 2; ++axis) {
    const int64_t image = size_along(config, "image_size", axis);
    const int64_t patch = size_along(config, "patch_size", axis);
    TORCH_CHECK_VALUE(patch > 0 && image >= patch,
                      "patch_size: expected a positive number up to image_size, got ", patch);
    const auto patches = static_cast<double>(image / patch);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const double place = static_cast<double>(-pair) / static_cast<double>(pairs);
      frequencies.push_back(2 * pi * std::pow(spec.base, place) / patches);
    }
  }
  spec.sections = Sections::of({pairs, pairs});
  spec.custom_frequencies = frequencies;
}

/// Pixtral: height uses the even members of one series, width the odd ones.
void set_shared_series(RotarySpec& spec) {
  RotarySpec whole_series(spec.head_dim);
  whole_series.base = spec.base;
  const std::vector<double> series = frequencies_of(whole_series);
  std::vector<double> frequencies;
  for (const size_t first : {0, 1}) {
    for (size_t pair = first; pair < series.size(); pair += 2) frequencies.push_back(series[pair]);
  }
  spec.sections = Sections::of({spec.head_dim / 4, spec.head_dim / 4});
  spec.custom_frequencies = frequencies;
}

/// Video: three axes; components that remain after the division by three are not rotated.
void set_time_height_width(RotarySpec& spec) {
  const int64_t pairs = spec.head_dim / 6;
  spec.rotary_dim = 6 * pairs;
  spec.sections = Sections::of({pairs, pairs, pairs}, false, true);
}

/// Two axes, each with the whole series.
void set_two_axes(RotarySpec& spec, const std::string& grid) {
  const int64_t pairs = spec.head_dim / 4;
  const Axes height = repeated({0}, pairs), width = repeated({1}, pairs);
  Axes axes = concatenated(height, width);
  if (grid == "width_height") axes = concatenated(width, height);
  if (grid == "width_height_in_turns") axes = repeated({1, 0}, pairs);
  spec.sections = Sections{axes, true};
}

}  // namespace

Sections in_turns(std::vector<int64_t> sizes, int64_t pairs) {
  TORCH_CHECK_VALUE(!sizes.empty(), "mrope_section: expected sizes, got none");
  const int64_t later = std::accumulate(sizes.begin() + 1, sizes.end(), int64_t{0});
  sizes.front() = std::max(sizes.front(), pairs - later);
  Axes axes = Sections::of(sizes, true).axis_of_pair;
  axes.resize(std::min(axes.size(), static_cast<size_t>(pairs)));
  return with_axes(std::move(axes), static_cast<int64_t>(sizes.size()));
}

std::optional<Sections> sections_of_text(Keys& rope, const json& axes, int64_t pairs) {
  const json sizes = rope.same({"mrope_section", "xdrope_section"});
  const json turns = rope.same({"mrope_interleaved", "interleaved"});
  const std::string order = text_of(get(axes, "order"));
  if (order == "two_in_turns") return alternating(pairs);
  TORCH_CHECK_VALUE(!order.empty() || sizes.is_null(),
                    "mrope_section: the model's code has no sections, got ", repr(sizes));
  if (order.empty() || (sizes.is_null() && truthy(get(axes, "if_stated")))) return std::nullopt;
  const Axes given = sizes_or(sizes, get(axes, "sizes"));
  if (order == "time_last") return time_last(given, pairs);
  const bool in_order = order == "alternating";
  same("mrope_interleaved", {in_order, turns});
  return in_order ? in_turns(given, pairs) : Sections::of(given);
}

void set_axes_of_tower(RotarySpec& spec, Keys& config, const std::string& grid) {
  if (grid == "whole_grid") return set_whole_grid(spec, config);
  if (grid == "normalised") return set_normalised_grid(spec, config);
  if (grid == "shared_series") return set_shared_series(spec);
  if (grid == "time_height_width") return set_time_height_width(spec);
  set_two_axes(spec, grid);
}

void set_window_of_axis(RotarySpec& spec, const std::optional<std::string>& axis) {
  if (!axis.has_value()) {
    spec.sections = Sections::of({spec.head_dim / 4, spec.head_dim / 4}, false, true);
    spec.sections->within_axes = true;
    return;
  }
  TORCH_CHECK_VALUE(axis == "height" || axis == "width",
                    "layer_type: expected None for both axes, 'height' or 'width', got ",
                    repr(json(*axis)));
  spec.rotary_dim = spec.head_dim / 2;
  spec.rotary_start = axis == "height" ? 0 : spec.head_dim / 2;
}

}  // namespace posembed::configuration
