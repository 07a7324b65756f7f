#include "rotary/presets.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>
#include <numeric>

#include "core/brief.h"
#include "dispatcher/first_use.h"

namespace posembed {
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
