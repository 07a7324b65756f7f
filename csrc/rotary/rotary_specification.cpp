
#include <ATen/ops/empty.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/brief.h"
#include "dispatcher/fork.h"
#include "dispatcher/tensors.h"
#include "dispatcher/text_cache.h"
#include "posembed/score_scale.h"
#include "rotary/rotary.h"
#include "rotary/rotary_checks.h"
#include "rotary/rotary_operator.h"

namespace posembed {
namespace {

/// The first pair of each run of pairs of one axis, then the number of pairs.
std::vector<int64_t> runs_of(const std::vector<int64_t>& axis_of_pair) {
  std::vector<int64_t> result;
  for (size_t pair = 0; pair < axis_of_pair.size(); ++pair) {
    const bool begins = pair == 0 || axis_of_pair[pair] != axis_of_pair[pair - 1];
    if (begins) result.push_back(static_cast<int64_t>(pair));
  }
  result.push_back(static_cast<int64_t>(axis_of_pair.size()));
  return result;
}

void check_within_axes(const RotarySpec& spec) {
  if (!spec.sections->within_axes) return;
  TORCH_CHECK_VALUE(!spec.interleaved,
                    "sections: expected within_axes=False for interleaved pairs, which always are");
  const std::vector<int64_t>& axes = spec.sections->axis_of_pair;
  const std::set<int64_t> distinct(axes.begin(), axes.end());
  TORCH_CHECK_VALUE(runs_of(axes).size() == distinct.size() + 1,
                    "sections: expected the pairs of each axis side by side for within_axes");
}

void check_sections(const RotarySpec& spec) {
  if (!spec.sections.has_value()) return;
  const std::vector<int64_t>& axes = spec.sections->axis_of_pair;
  TORCH_CHECK_VALUE(static_cast<int64_t>(axes.size()) == spec.rotary_dim / 2,
                    "sections: expected an axis for each of rotary_dim / 2 = ", spec.rotary_dim / 2,
                    " pairs, got ", axes.size());
  for (const int64_t axis : axes) {
    TORCH_CHECK_VALUE(axis >= 0 && axis < rotary::max_axes, "sections: expected axes 0 to ",
                      rotary::max_axes - 1, ", got ", axis);
  }
  check_within_axes(spec);
  const int64_t used = spec.sections->used_axes(), declared = spec.sections->position_axes();
  TORCH_CHECK_VALUE(declared >= used && declared <= rotary::max_axes,
                    "sections: expected axes of positions, ", used, " to ", rotary::max_axes,
                    ", got ", declared);
}

void check_custom_frequencies(const RotarySpec& spec) {
  if (!spec.custom_frequencies.has_value()) return;
  const std::vector<double>& frequencies = *spec.custom_frequencies;
  TORCH_CHECK_VALUE(static_cast<int64_t>(frequencies.size()) == spec.rotary_dim / 2,
                    "custom_frequencies: expected rotary_dim / 2 = ", spec.rotary_dim / 2,
                    " numbers, got ", frequencies.size());
  for (const double frequency : frequencies) {
    TORCH_CHECK_VALUE(std::isfinite(frequency), "custom_frequencies: expected finite numbers, got ",
                      frequency);
  }
  TORCH_CHECK_VALUE(std::holds_alternative<std::monostate>(spec.scaling),
                    "scaling: expected none beside custom_frequencies");
}

void check_custom_attention_factor(const RotarySpec& spec) {
  if (!spec.custom_attention_factor.has_value()) return;
  const double factor = *spec.custom_attention_factor;
  TORCH_CHECK_VALUE(spec.custom_frequencies.has_value(),
                    "custom_attention_factor: expected None without custom_frequencies, got ",
                    factor);
  TORCH_CHECK_VALUE(std::isfinite(factor) && factor > 0.0,
                    "custom_attention_factor: expected a finite positive number, got ", factor);
}

void check_numerics(const RotarySpec& spec) {
  TORCH_CHECK_VALUE(
      spec.numerics == Numerics::exact || !std::holds_alternative<XPosScaling>(spec.scaling),
      "numerics: expected 'exact' for XPosScaling, which no common program computes ",
      "in one way, got '", name(spec.numerics), "'");
}

/// Checks the results, because they may overflow even if each number is valid.
void check_results(const rotary::Scaled& numbers) {
  for (const core::DoubleDouble& frequency : numbers.frequencies) {
    TORCH_CHECK_VALUE(std::isfinite(frequency.high), "scaling: expected finite frequencies, got ",
                      frequency.high);
  }
  TORCH_CHECK_VALUE(std::isfinite(numbers.attention_factor) && numbers.attention_factor > 0.0,
                    "attention_factor: expected a finite positive number, got ",
                    numbers.attention_factor);
}

}  // namespace

RotarySpec::RotarySpec(int64_t head_dim) : head_dim(head_dim), rotary_dim(head_dim) {}

void RotarySpec::check() const {
  check_fields();
  check_results(rotary::scaled(*this));
}

void RotarySpec::check_fields() const {
  TORCH_CHECK_VALUE(head_dim > 0, "head_dim: expected a positive number, got ", head_dim);
  TORCH_CHECK_VALUE(rotary_dim >= 0 && rotary_dim % 2 == 0,
                    "rotary_dim: expected an even number, got ", rotary_dim);
  TORCH_CHECK_VALUE(rotary_start >= 0, "rotary_start: expected 0 or more, got ", rotary_start);
  TORCH_CHECK_VALUE(rotary_dim <= head_dim && rotary_start <= head_dim - rotary_dim,
                    "rotary_start + rotary_dim: expected at most head_dim, ", head_dim, ", got ",
                    rotary_start, " + ", rotary_dim);
  TORCH_CHECK_VALUE(rotary_dim <= 2 * rotary::max_pairs, "rotary_dim: expected at most ",
                    2 * rotary::max_pairs, ", got ", rotary_dim);
  TORCH_CHECK_VALUE(std::isfinite(base) && base >= 1.0,
                    "base: expected a finite number of at least 1, got ", base);
  rotary::check_scaling(*this);
  check_sections(*this);
  check_custom_frequencies(*this);
  check_custom_attention_factor(*this);
  check_numerics(*this);
  if (score_scale.has_value()) score_scale->check();
}

RotarySpec RotarySpec::from_json(const std::string& text) {
  const RotarySpec spec = rotary::parse(text);
  spec.check();
  return spec;
}

bool RotarySpec::operator==(const RotarySpec& other) const {
  RotarySpec ours = *this, theirs = other;
  ours.score_scale.reset();
  theirs.score_scale.reset();
  return ours.to_json() == theirs.to_json();
}

RotarySpec RotarySpec::for_keys() const {
  RotarySpec result = *this;
  if (auto* xpos = std::get_if<XPosScaling>(&result.scaling)) xpos->scale_base = -xpos->scale_base;
  return result;
}

int64_t Sections::used_axes() const {
  if (axis_of_pair.empty()) return 1;
  return 1 + *std::max_element(axis_of_pair.begin(), axis_of_pair.end());
}

Sections Sections::of(const std::vector<int64_t>& sizes, bool interleaved, bool restart) {
  const auto axes = static_cast<int64_t>(sizes.size());
  Sections result{{}, restart};
  for (int64_t axis = 0; axis < axes; ++axis) {
    const int64_t size = sizes[static_cast<size_t>(axis)];
    const auto left = rotary::max_pairs - static_cast<int64_t>(result.axis_of_pair.size());
    TORCH_CHECK_VALUE(size >= 0, "sections: expected sizes of 0 or more, got ", size);
    TORCH_CHECK_VALUE(size <= left, "sections: expected at most ", rotary::max_pairs,
                      " pairs in all, got a size of ", size, " for axis ", axis);
    result.axis_of_pair.insert(result.axis_of_pair.end(), static_cast<size_t>(size), axis);
  }
  const auto pairs = static_cast<int64_t>(result.axis_of_pair.size());
  for (int64_t pair = 0; interleaved && pair < pairs; ++pair) {
    const int64_t axis = pair % axes;
    const bool taken = pair / axes < sizes[static_cast<size_t>(axis)];
    result.axis_of_pair[static_cast<size_t>(pair)] = taken ? axis : 0;
  }
  if (axes > result.used_axes()) result.axes = axes;
  return result;
}

namespace rotary {
namespace {

auto& specifications = *new dispatcher::TextCache<Specification>;

constexpr std::string_view heads_mark = "heads ";

/// The text of a specification without the heads in front.
std::string without_heads(std::string_view text) {
  const bool marked = text.substr(0, heads_mark.size()) == heads_mark;
  return std::string(marked ? text.substr(std::min(text.find('{'), text.size())) : text);
}

}  // namespace

Specification::Specification(std::string_view text) : spec(parse(without_heads(text))) {
  spec.check_fields();
  if (text.substr(0, heads_mark.size()) == heads_mark) {
    std::istringstream(std::string(text.substr(heads_mark.size()))) >> heads >> key_heads;
  }
  Scaled numbers = scaled(spec);
  check_results(numbers);
  for (const core::DoubleDouble& frequency : numbers.frequencies) {
    wide_turns.push_back(core::turn_from_radians(frequency));
    turns.push_back(core::round_to_turn64(wide_turns.back()));
  }
  frequencies = std::move(numbers.frequencies);
  attention_factor = numbers.attention_factor;
  decay = std::move(numbers.decay);
  decay_center = numbers.decay_center;
  for_keys = spec.for_keys().to_json();
  if (spec.sections.has_value()) {
    for (const int64_t axis : spec.sections->axis_of_pair) {
      axis_of_pair.push_back(static_cast<uint8_t>(axis));
    }
    if (spec.sections->within_axes) windows = runs_of(spec.sections->axis_of_pair);
    axes = spec.sections->position_axes();
    used_axes = spec.sections->used_axes();
  }
}

SpecificationPointer specification(std::string_view text) { return specifications.find(text); }

}  // namespace rotary
}  // namespace posembed

namespace posembed::rotary {
namespace {

// ------------------------------------------------------------------------- specification operators
// Operators that give Python a specification's canonical text, its numbers and its explanations.

Tensor frequencies_of(Text text, std::optional<at::Device> device) {
  const SpecificationPointer spec = specification(text);
  Tensor result = at::empty({static_cast<int64_t>(spec->frequencies.size())}, at::kDouble);
  double* value = result.mutable_data_ptr<double>();
  for (const core::DoubleDouble& frequency : spec->frequencies) *value++ = frequency.high;
  return result.to(device.value_or(at::kCPU));
}

double rotary_attention_factor(Text text) { return specification(text)->attention_factor; }

std::string rotary_specification(Text text) { return specification(text)->spec.to_json(); }

std::string rotary_resolve(Text text, int64_t seq_len) {
  return specification(text)->spec.resolve(seq_len).to_json();
}

std::string rotary_for_keys(Text text) { return specification(text)->for_keys; }

std::string rotary_description(Text text) { return specification(text)->spec.describe(); }

std::string rotary_explanation(Text text, std::optional<int64_t> seq_len,
                               std::optional<int64_t> max_positions) {
  return specification(text)->spec.explain(seq_len, max_positions);
}

std::tuple<double, int64_t> rotary_float32_error(Text text, int64_t length) {
  const AngleError error = specification(text)->spec.float32_error(length);
  return {error.radians, error.position};
}

std::string rotary_difference(Text text, Text other) {
  return specification(text)->spec.diff(specification(other)->spec);
}

Tensor rotary_wavelengths(Text text, std::optional<at::Device> device) {
  return specification(text)->spec.wavelengths().to(device.value_or(at::kCPU));
}

std::vector<int64_t> rotary_sections(at::IntArrayRef sizes, bool interleaved) {
  return Sections::of(sizes.vec(), interleaved).axis_of_pair;
}

std::string rotary_axial(const c10::List<std::string>& axes, bool within_axes) {
  std::vector<RotarySpec> specs;
  for (const std::string& text : axes) specs.push_back(specification(text)->spec);
  return RotarySpec::axial(specs, within_axes).to_json();
}

std::string rotary_preset(Text name, std::optional<int64_t> head_dim, at::OptionalIntArrayRef axes,
                          std::optional<double> base, std::optional<at::ArrayRef<double>> ntk) {
  PresetNumbers stated;
  stated.head_dim = head_dim;
  stated.base = base;
  if (axes.has_value()) stated.axes = axes->vec();
  if (ntk.has_value()) stated.ntk = ntk->vec();
  return preset(std::string(name), stated).to_json();
}

}  // namespace

TORCH_LIBRARY_IMPL(posembed, CompositeExplicitAutograd, m) {
  m.impl("rotary_frequencies", frequencies_of);
  m.impl("rotary_attention_factor", rotary_attention_factor);
  m.impl("rotary_specification", rotary_specification);
  m.impl("rotary_resolve", rotary_resolve);
  m.impl("rotary_for_keys", rotary_for_keys);
  m.impl("rotary_description", rotary_description);
  m.impl("rotary_explanation", rotary_explanation);
  m.impl("rotary_float32_error", rotary_float32_error);
  m.impl("rotary_difference", rotary_difference);
  m.impl("rotary_wavelengths", rotary_wavelengths);
  m.impl("rotary_axial", rotary_axial);
  m.impl("rotary_preset", rotary_preset);
  m.impl("rotary_sections", rotary_sections);
}

}  // namespace posembed::rotary

namespace posembed {
namespace {

// ------------------------------------------------------------------------------------------- axial
// A specification for positions with several axes, from one for each axis.

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

// -------------------------------------------------------------------------------------- resolution
// Resolves specifications whose frequencies depend on the sequence's length to those of one length.

bool RotarySpec::is_dynamic() const {
  if (const auto* scaling = std::get_if<LongRopeScaling>(&this->scaling)) {
    return scaling->short_factor != scaling->long_factor ||
           scaling->long_attention_factor.has_value();
  }
  return std::holds_alternative<DynamicNtkScaling>(scaling);
}

RotarySpec RotarySpec::resolve(int64_t seq_len) const {
  TORCH_CHECK_VALUE(seq_len >= 0, "seq_len: expected 0 or more, got ", seq_len);
  check_fields();
  RotarySpec result = *this;
  if (const auto* dynamic = std::get_if<DynamicNtkScaling>(&scaling)) {
    result.scaling = std::monostate();
    if (seq_len > dynamic->original_max_positions) {
      const double stretch =
          static_cast<double>(seq_len) / static_cast<double>(dynamic->original_max_positions);
      // Keep the base, because a double cannot hold the new one exactly.
      result.scaling = NtkScaling{dynamic->factor * stretch - (dynamic->factor - 1.0)};
    }
  }
  if (auto* longrope = std::get_if<LongRopeScaling>(&result.scaling)) {
    if (seq_len > longrope->original_max_positions) {
      longrope->short_factor = longrope->long_factor;
      if (longrope->long_attention_factor.has_value()) {
        longrope->attention_factor = longrope->long_attention_factor;
      }
    } else {
      longrope->long_factor = longrope->short_factor;
    }
    longrope->long_attention_factor = std::nullopt;
  }
  return result;
}

double RotarySpec::attention_factor(std::optional<int64_t> seq_len) const {
  if (seq_len.has_value()) return resolve(*seq_len).attention_factor();
  check();
  return rotary::scaled(*this).attention_factor;
}

// ------------------------------------------------------------------------------------- score scale

torch::Tensor ScoreScale::at(const torch::Tensor& positions) const {
  TORCH_CHECK_TYPE(at::isIntegralType(positions.scalar_type(), /*includeBool=*/false),
                   "positions: expected integers, got ",
                   dispatcher::dtype_name(positions.scalar_type()));
  const torch::Tensor position = positions.to(torch::kDouble).clamp_min(0.0);  // -1 is padding
  if (logn) return ((position + 1.0).log() / std::log(length)).clamp_min(1.0) * factor;
  return (((position + offset) / length).floor().log1p() * growth + 1.0) * factor;
}

std::string ScoreScale::describe() const {
  std::ostringstream line;
  if (is_constant() || factor != 1.0) line << factor;
  if (!is_constant() && factor != 1.0) line << " times ";
  if (logn) {
    line << "max(1, log(position + 1) / log(" << length << "))";
  } else if (growth != 0.0) {
    const std::string shift = offset == 0 ? "" : " + " + std::to_string(offset);
    const std::string place = shift.empty() ? "position" : "(position" + shift + ")";
    line << "1 + " << growth << " log(1 + floor(" << place << " / " << length << "))";
  }
  if (!source.empty()) line << " (" << source << ")";
  return line.str();
}

void ScoreScale::check() const {
  TORCH_CHECK_VALUE(std::isfinite(factor) && factor > 0.0,
                    "score_scale: expected a positive factor, got ", factor);
  TORCH_CHECK_VALUE(std::isfinite(growth), "score_scale: expected a finite growth, got ", growth);
  TORCH_CHECK_VALUE(std::isfinite(length) && (logn ? length > 1.0 : length > 0.0),
                    "score_scale: expected a positive length, with logn above 1, got ", length);
  TORCH_CHECK_VALUE(offset >= 0, "score_scale: expected an offset of 0 or more, got ", offset);
  TORCH_CHECK_VALUE(!logn || growth == 0.0, "score_scale: expected no growth beside logn, got ",
                    growth);
}

namespace rotary {
namespace {

torch::Tensor score_scale(const torch::Tensor& positions, double factor, double growth,
                          double length, int64_t offset, bool logn) {
  return ScoreScale{factor, growth, length, offset, logn, ""}.at(positions);
}

}  // namespace

TORCH_LIBRARY_IMPL(posembed, CompositeImplicitAutograd, m) { m.impl("score_scale", score_scale); }

}  // namespace rotary

// ----------------------------------------------------------------------------------------- presets

namespace rotary {
namespace {

using nlohmann::json;

constexpr const char* table_text =
#include "rotary/rotary_presets.inc"
    ;

const json& presets_table() {
  static dispatcher::FirstUse<json> parsed;
  return parsed.get([] { return json::parse(table_text); });
}

/// The names of an object's keys, in quotes.
std::string names_of(const json& object) {
  std::string names;
  for (const auto& each : object.items()) names += (names.empty() ? "'" : ", '") + each.key() + "'";
  return "[" + names + "]";
}

/// The entry of a name; throws for others.
const json& entry(const std::string& name) {
  const json &refused = presets_table()["refused"], &known = presets_table()["presets"];
  TORCH_CHECK_VALUE(!refused.contains(name), name,
                    ": has no specification: ", refused.value(name, std::string()));
  TORCH_CHECK_VALUE(known.contains(name), "name: expected one of ", names_of(known), ", got '",
                    core::brief(name), "'");
  return known[name];
}

/// The parts of a head: a number of components for every `of`; null is what remains.
std::vector<int64_t> parts_of(const json& rule, int64_t head_dim) {
  const int64_t share = head_dim / rule["of"].get<int64_t>();
  std::vector<int64_t> sizes;
  for (const json& part : rule["parts"]) {
    sizes.push_back(part.is_null() ? 0 : share * part.get<int64_t>());
  }
  const int64_t rest = head_dim - std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  for (int64_t& size : sizes) size = size == 0 ? rest : size;
  return sizes;
}

/// The components of each axis.
std::vector<int64_t> axes_of(const json& preset, const PresetNumbers& stated) {
  if (stated.axes.has_value()) return *stated.axes;
  const json& axes = preset["axes"];
  if (axes.is_array()) return axes;
  return parts_of(
      axes, stated.head_dim.has_value() ? *stated.head_dim : preset["head_dim"].get<int64_t>());
}

void check_head_dim(const std::vector<int64_t>& axes, const PresetNumbers& stated) {
  const int64_t total = std::accumulate(axes.begin(), axes.end(), int64_t{0});
  TORCH_CHECK_VALUE(!stated.head_dim.has_value() || *stated.head_dim == total,
                    "head_dim: expected ", total, ", the sum of the axes ", c10::IntArrayRef(axes),
                    ", got ", stated.head_dim.value_or(0));
}

RotaryScaling scaling_of_axis(const json& preset, const std::optional<std::vector<double>>& ntk,
                              size_t axis) {
  if (preset.contains("scale")) return LinearScaling{1 / preset["scale"].get<double>()};
  if (!ntk.has_value() || (*ntk)[axis] == 1.0) return {};
  return NtkScaling{(*ntk)[axis]};
}

}  // namespace

RotarySpec preset(const std::string& name, const PresetNumbers& stated) {
  TORCH_CHECK_VALUE(stated.head_dim.value_or(1) > 0, "head_dim: expected a positive number, got ",
                    stated.head_dim.value_or(1));
  const json& found = entry(name);
  const std::vector<int64_t> axes = axes_of(found, stated);
  check_head_dim(axes, stated);
  std::optional<std::vector<double>> ntk = stated.ntk;
  if (!ntk.has_value() && found.contains("ntk")) ntk = found["ntk"].get<std::vector<double>>();
  TORCH_CHECK_VALUE(!ntk.has_value() || ntk->size() == axes.size(), "rope_scale: expected ",
                    axes.size(), " numbers, got ", ntk.has_value() ? ntk->size() : 0);
  const std::string pairing = found["pairing"].get<std::string>();
  std::vector<RotarySpec> parts;
  for (size_t axis = 0; axis < axes.size(); ++axis) {
    RotarySpec& part = parts.emplace_back(axes[axis]);
    part.base = stated.base.has_value() ? *stated.base : found["base"].get<double>();
    part.scaling = scaling_of_axis(found, ntk, axis);
    part.interleaved = pairing == "interleaved";
  }
  return RotarySpec::axial(parts, pairing != "half_split");
}

}  // namespace rotary

RotarySpec RotarySpec::from_preset(const std::string& name, std::optional<int64_t> head_dim) {
  rotary::PresetNumbers stated;
  stated.head_dim = head_dim;
  return rotary::preset(name, stated);
}

}  // namespace posembed
