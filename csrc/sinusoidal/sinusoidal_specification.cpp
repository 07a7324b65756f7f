// Specifications: their fields, presets and checks, and the numbers that kernels read.
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/brief.h"
#include "dispatcher/fields.h"
#include "dispatcher/fork.h"
#include "dispatcher/text_cache.h"
#include "sinusoidal/sinusoidal_operator.h"

namespace posembed {

template <typename Visitor>
static void fields(Visitor& visit, SinusoidalSpec& spec) {
  visit("embedding_dim", spec.embedding_dim);
  visit("base", spec.base);
  visit("preset", spec.preset);
  visit("cos_first", spec.cos_first);
  visit("shift", spec.shift);
  visit("scale", spec.scale);
  visit("position_scale", spec.position_scale);
  visit("padding_idx", spec.padding_idx);
  visit("axes", spec.axes);
  visit("widths", spec.widths);
  visit("start", spec.start);
  visit("length", spec.length);
  visit("interpolation_scale", spec.interpolation_scale);
  visit("max_size", spec.max_size);
}

namespace {

/// More than any grid has.
constexpr size_t max_axes = 8;

/// More than any model has: each frequency is computed.
constexpr int64_t max_columns = 65536;

/// The largest index of a table's row in any program.
constexpr int64_t max_padding_idx = std::numeric_limits<int32_t>::max();

/// Larger ones would leave no digits of float64 positions.
constexpr int64_t max_position_scale = std::numeric_limits<int32_t>::max();

/// A preset of several axes: the preset of each block of columns, their axes and relative widths,
/// and the positions of a grid's cells.
struct AxesPreset {
  const char* name;
  const char* of_block;
  std::vector<int64_t> axes, widths;
  sinusoidal::GridRule grid;
};

constexpr double two_pi = 6.283185307179586;

/// Each as the program of its name has it: transformers' Detr, Sam2 and ViTMAE, diffusers'
/// PatchEmbed with the sizes of SD 3 and PixArt, and CogVideoXPatchEmbed.
const std::vector<AxesPreset>& axes_presets() {
  static dispatcher::FirstUse<std::vector<AxesPreset>> presets;
  return presets.get([] {
    return std::vector<AxesPreset>{
        {"detr", "vaswani", {0, 1}, {1, 1}, {1.0, two_pi, 1e-6, 0, {1, 1}}},
        {"sam2", "vaswani", {0, 1}, {1, 1}, {1.0, two_pi, 1e-6, 0, {1, 1}}},
        {"mae", "marian", {1, 0}, {1, 1}, {0.0, 0.0, 0.0, 0, {1, 1}}},
        {"sd3", "marian", {1, 0}, {1, 1}, {0.0, 64.0, 0.0, 192, {1, 1}}},
        {"pixart", "marian", {1, 0}, {1, 1}, {0.0, 32.0, 0.0, 0, {1, 1}}},
        {"cogvideox", "marian", {0, 2, 1}, {2, 3, 3}, {0.0, 0.0, 0.0, 0, {1, 1.875, 1.875}}},
    };
  });
}

const AxesPreset* find_axes_preset(const std::string& name) {
  for (const AxesPreset& preset : axes_presets()) {
    if (name == preset.name) return &preset;
  }
  return nullptr;
}

/// The axis of each block; empty with one axis.
std::vector<int64_t> axes_of(const SinusoidalSpec& spec) {
  if (spec.axes.has_value()) return *spec.axes;
  const AxesPreset* preset = find_axes_preset(spec.preset);
  return preset == nullptr ? std::vector<int64_t>() : preset->axes;
}

/// The preset of each block, or of the only one.
std::string preset_of_block(const SinusoidalSpec& spec) {
  const AxesPreset* preset = find_axes_preset(spec.preset);
  return preset == nullptr ? spec.preset : preset->of_block;
}

/// The columns of each block.
std::vector<int64_t> widths_of(const SinusoidalSpec& spec) {
  if (spec.widths.has_value()) return *spec.widths;
  const AxesPreset* preset = find_axes_preset(spec.preset);
  const size_t count = axes_of(spec).size();
  std::vector<int64_t> widths(count, 1);
  if (preset != nullptr && preset->widths.size() == count) widths = preset->widths;
  const int64_t parts = std::accumulate(widths.begin(), widths.end(), int64_t{0});
  TORCH_CHECK_VALUE(spec.embedding_dim % parts == 0, "embedding_dim: expected a multiple of ",
                    parts, " for the axes of '", spec.preset, "', got ", spec.embedding_dim);
  for (int64_t& width : widths) width *= spec.embedding_dim / parts;
  return widths;
}

void check_axes(const SinusoidalSpec& spec) {
  const std::vector<int64_t> axes = axes_of(spec);
  if (axes.empty()) {
    TORCH_CHECK_VALUE(!spec.axes.has_value(), "axes: expected an axis for each block, got none");
    const bool alone =
        spec.widths || spec.start || spec.length || spec.interpolation_scale || spec.max_size;
    TORCH_CHECK_VALUE(!alone,
                      "axes: expected the axis of each block beside widths, start, length, "
                      "interpolation_scale or max_size");
    return;
  }
  std::vector<int64_t> sorted = axes;
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < sorted.size(); ++i) {
    TORCH_CHECK_VALUE(sorted[i] == static_cast<int64_t>(i), "axes: expected each of 0 to ",
                      axes.size() - 1, " once, got ", axes);
  }
  TORCH_CHECK_VALUE(!spec.padding_idx.has_value() && spec.preset != "fairseq",
                    "padding_idx: expected none with several axes");
  const std::vector<int64_t> widths = widths_of(spec);
  const bool positive = std::all_of(widths.begin(), widths.end(), [&](int64_t width) {
    return width >= 1 && width <= spec.embedding_dim;
  });
  TORCH_CHECK_VALUE(
      positive && widths.size() == axes.size() && axes.size() <= max_axes &&
          std::accumulate(widths.begin(), widths.end(), int64_t{0}) == spec.embedding_dim,
      "widths: expected ", axes.size(), " numbers with the sum ", spec.embedding_dim, ", got ",
      widths);
  TORCH_CHECK_VALUE(std::isfinite(spec.start.value_or(0)), "start: expected a finite number, got ",
                    *spec.start);
  TORCH_CHECK_VALUE(std::isfinite(spec.length.value_or(0)) && spec.length.value_or(0) >= 0,
                    "length: expected a finite number of at least 0, got ", *spec.length);
  TORCH_CHECK_VALUE(spec.max_size.value_or(0) >= 0, "max_size: expected 0 or more, got ",
                    *spec.max_size);
  if (!spec.interpolation_scale.has_value()) return;
  for (const double scale : *spec.interpolation_scale) {
    TORCH_CHECK_VALUE(std::isfinite(scale) && scale > 0,
                      "interpolation_scale: expected finite numbers above 0, got ", scale);
  }
  TORCH_CHECK_VALUE(spec.interpolation_scale->size() == axes.size(),
                    "interpolation_scale: expected ", axes.size(), " numbers, got ",
                    *spec.interpolation_scale);
}

sinusoidal::GridRule grid_rule_of(const SinusoidalSpec& spec) {
  const AxesPreset* preset = find_axes_preset(spec.preset);
  sinusoidal::GridRule rule = preset == nullptr ? sinusoidal::GridRule() : preset->grid;
  rule.start = spec.start.value_or(rule.start);
  rule.length = spec.length.value_or(rule.length);
  rule.max_size = spec.max_size.value_or(rule.max_size);
  if (spec.interpolation_scale.has_value()) rule.interpolation_scale = *spec.interpolation_scale;
  rule.interpolation_scale.resize(axes_of(spec).size(), 1.0);
  return rule;
}

/// The specification of a block of columns.
SinusoidalSpec block_of(const SinusoidalSpec& spec, int64_t width) {
  SinusoidalSpec block(width);
  block.base = spec.base;
  block.preset = preset_of_block(spec);
  block.cos_first = spec.cos_first;
  block.shift = spec.shift;
  block.scale = spec.scale;
  block.position_scale = spec.position_scale;
  return block;
}

sinusoidal::Preset preset_of(const std::string& name) {
  if (name == "vaswani") return sinusoidal::Preset::vaswani;
  if (name == "marian") return sinusoidal::Preset::marian;
  if (name == "tensor2tensor" || name == "ddpm" || name == "fairseq") {
    return sinusoidal::Preset::tensor2tensor;
  }
  TORCH_CHECK_VALUE(false, "preset: expected 'vaswani', 'marian', 'tensor2tensor', 'ddpm', ",
                    "'fairseq', 'detr', 'sam2', 'mae', 'sd3', 'pixart' or 'cogvideox', got '",
                    core::brief(name), "'");
}

double divisor_of(const SinusoidalSpec& spec) {
  const sinusoidal::Preset preset = preset_of(spec.preset);
  const double usual = preset == sinusoidal::Preset::tensor2tensor ? 1.0 : 0.0;
  return sinusoidal::divisor_of(preset, spec.embedding_dim, spec.shift.value_or(usual));
}

/// The index of position 0 in the series; 0 without padding.
int64_t first_of(const SinusoidalSpec& spec) {
  if (spec.padding_idx.has_value()) return *spec.padding_idx + 1;
  return spec.preset == "fairseq" ? 2 : 0;
}

}  // namespace

SinusoidalSpec::SinusoidalSpec(int64_t embedding_dim) : embedding_dim(embedding_dim) {}

void SinusoidalSpec::check() const {
  TORCH_CHECK_VALUE(embedding_dim > 0 && embedding_dim <= max_columns,
                    "embedding_dim: expected 1 to ", max_columns, ", got ", embedding_dim);
  TORCH_CHECK_VALUE(std::isfinite(base) && base >= 1.0,
                    "base: expected a finite number of at least 1, got ", base);
  TORCH_CHECK_VALUE(std::isfinite(scale), "scale: expected a finite number, got ", scale);
  TORCH_CHECK_VALUE(position_scale >= 1 && position_scale <= max_position_scale,
                    "position_scale: expected 1 to ", max_position_scale, ", got ", position_scale);
  TORCH_CHECK_VALUE(std::isfinite(shift.value_or(0.0)), "shift: expected a finite number, got ",
                    shift.value_or(0.0));
  TORCH_CHECK_VALUE(padding_idx.value_or(0) >= 0 && padding_idx.value_or(0) <= max_padding_idx,
                    "padding_idx: expected 0 to ", max_padding_idx, ", got ",
                    padding_idx.value_or(0));
  check_axes(*this);
  if (!axes_of(*this).empty()) {
    for (const int64_t width : widths_of(*this)) block_of(*this, width).check();
    return;
  }
  // A single frequency is 1 and needs no divisor.
  TORCH_CHECK_VALUE(embedding_dim <= 3 || divisor_of(*this) > 0,
                    "shift: expected less than half of embedding_dim, ", embedding_dim, ", got ",
                    shift.value_or(1.0));
}

// nlohmann::json keeps keys sorted, so equal specifications have equal text.
std::string SinusoidalSpec::to_json() const { return dispatcher::written(*this).dump(); }

SinusoidalSpec SinusoidalSpec::from_json(const std::string& text) {
  SinusoidalSpec spec(0);
  dispatcher::read_text("SinusoidalSpec", text, [&](nlohmann::json object) {
    dispatcher::read_fields("SinusoidalSpec", std::move(object), spec);
  });
  spec.check();
  return spec;
}

int64_t SinusoidalSpec::num_axes() const {
  return std::max<int64_t>(1, static_cast<int64_t>(axes_of(*this).size()));
}

bool SinusoidalSpec::operator==(const SinusoidalSpec& other) const {
  return to_json() == other.to_json();
}

namespace sinusoidal {
namespace {

auto& specifications = *new dispatcher::TextCache<Specification>;

}  // namespace

Specification::Specification(std::string_view text)
    : Specification(SinusoidalSpec::from_json(std::string(text))) {}

Specification::Specification(const SinusoidalSpec& checked) : spec(checked) {
  const std::vector<int64_t> axes = axes_of(spec);
  if (!axes.empty()) {
    const std::vector<int64_t> widths = widths_of(spec);
    int64_t column = 0;
    for (size_t i = 0; i < axes.size(); ++i) {
      parts.push_back(
          {axes[i], column, std::make_shared<Specification>(block_of(spec, widths[i]))});
      column += widths[i];
    }
    grid = grid_rule_of(spec);
    return;
  }
  layout = layout_of(preset_of(spec.preset), spec.embedding_dim, spec.cos_first.value_or(false));
  first = first_of(spec);
  frequencies = sinusoidal::frequencies(spec.base, posembed::divisor_of(spec), pairs_of(layout));
  for (const core::DoubleDouble& frequency : frequencies) {
    wide_turns.push_back(core::turn_from_radians(frequency));
    turns.push_back(core::round_to_turn64(wide_turns.back()));
  }
}

Sinusoid Specification::sinusoid(int64_t order) const {
  Sinusoid result;
  result.layout = layout;
  result.pairs = static_cast<int64_t>(turns.size());
  result.turns = turns.data();
  result.wide_turns = wide_turns.data();
  result.scale = spec.scale * std::pow(static_cast<double>(spec.position_scale), order);
  result.first = first;
  result.position_scale = spec.position_scale;
  result.order = order;
  return result;
}

const SinusoidalSpec& Part::spec() const { return specification->spec; }

std::string Part::text() const { return specification->spec.to_json(); }

SpecificationPointer specification(std::string_view text) { return specifications.find(text); }

SpecificationPointer specification_of_one_axis(std::string_view text) {
  SpecificationPointer found = specification(text);
  TORCH_CHECK_VALUE(found->parts.empty(), "spec: expected one axis, got ", found->parts.size());
  return found;
}

}  // namespace sinusoidal
}  // namespace posembed
