// Operators that give Python a specification's canonical text, its numbers and its explanations.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "rotary/operator.h"
#include "rotary/presets.h"
#include "rotary/specification.h"

namespace posembed::rotary {
namespace {

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
