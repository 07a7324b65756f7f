#include "rotary/specification.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <sstream>
#include <utility>

#include "dispatcher/text_cache.h"
#include "rotary/json.h"
#include "rotary/kernel.h"
#include "rotary/scaling.h"

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
