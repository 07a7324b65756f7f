#include "configuration/rotary_presets.h"

#include <c10/util/Exception.h>

#include <numeric>
#include <utility>
#include <vector>

#include "configuration/keys.h"
#include "dispatcher/first_use.h"

namespace posembed::configuration::presets {
namespace {

constexpr const char* table_text =
#include "configuration/rotary_presets.inc"
    ;

/// What a preset leaves open, and a model states.
struct Stated {
  std::optional<int64_t> head_dim = std::nullopt;
  std::optional<std::vector<int64_t>> axes = std::nullopt;
  std::optional<double> base = std::nullopt;
  std::optional<std::vector<double>> ntk = std::nullopt;
};

void check_not_refused(const std::string& name) {
  const json& refused = get(table(), "refused");
  if (!refused.contains(name)) return;
  const std::string why = text_of(refused[name]);
  TORCH_CHECK_VALUE(
      false, name, ": has no specification: ", refused.contains(why) ? text_of(refused[why]) : why);
}

/// The entry of a name in a part of the table; raises for others.
const json& entry(const char* part, const char* argument, const std::string& name) {
  check_not_refused(name);
  const json& known = get(table(), part);
  TORCH_CHECK_VALUE(known.contains(name), argument, ": expected one of ", repr(keys_of(known)),
                    ", got ", repr(json(name)));
  return known[name];
}

/// The parts of a head: a number of components for every `of`; null is what remains.
std::vector<int64_t> parts_of(const json& rule, int64_t head_dim) {
  const int64_t share = head_dim / whole("of", get(rule, "of"));
  std::vector<int64_t> sizes;
  for (const json& part : get(rule, "parts")) {
    sizes.push_back(part.is_null() ? 0 : share * whole("parts", part));
  }
  const int64_t rest = head_dim - std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  for (int64_t& size : sizes) size = size == 0 ? rest : size;
  return sizes;
}

/// The components of each axis.
std::vector<int64_t> axes_of(const json& preset, const Stated& stated) {
  if (stated.axes.has_value()) return *stated.axes;
  const json& axes = get(preset, "axes");
  if (axes.is_array()) return axes;
  return parts_of(axes, stated.head_dim.value_or(whole("head_dim", get(preset, "head_dim"))));
}

void check_head_dim(const std::vector<int64_t>& axes, const Stated& stated) {
  const int64_t total = std::accumulate(axes.begin(), axes.end(), int64_t{0});
  TORCH_CHECK_VALUE(!stated.head_dim.has_value() || *stated.head_dim == total,
                    "head_dim: expected ", total, ", the sum of the axes ", repr(json(axes)),
                    ", got ", *stated.head_dim);
}

RotaryScaling scaling_of_axis(const json& preset, const std::optional<std::vector<double>>& ntk,
                              size_t axis) {
  if (preset.contains("scale")) return LinearScaling{1 / real("scale", preset["scale"])};
  if (!ntk.has_value() || (*ntk)[axis] == 1.0) return {};
  return NtkScaling{(*ntk)[axis]};
}

RotarySpec specification_of(const json& preset, const Stated& stated) {
  const std::vector<int64_t> axes = axes_of(preset, stated);
  check_head_dim(axes, stated);
  std::optional<std::vector<double>> ntk = stated.ntk;
  if (!ntk.has_value() && preset.contains("ntk")) ntk = reals("ntk", preset["ntk"]);
  TORCH_CHECK_VALUE(!ntk.has_value() || ntk->size() == axes.size(), "rope_scale: expected ",
                    axes.size(), " numbers, got ", ntk->size());
  const std::string pairing = text_of(get(preset, "pairing"));
  std::vector<RotarySpec> parts;
  for (size_t axis = 0; axis < axes.size(); ++axis) {
    RotarySpec& part = parts.emplace_back(axes[axis]);
    part.base = stated.base.value_or(real("base", get(preset, "base")));
    part.scaling = scaling_of_axis(preset, ntk, axis);
    part.interleaved = pairing == "interleaved";
  }
  return RotarySpec::axial(parts, pairing != "half_split");
}

void check_no_options(const ConfigurationOptions& options) {
  const std::string why = "a configuration of diffusers states everything";
  if (options.layer_type()) check_effect("layer_type", *options.layer_type(), why);
  if (options.part()) check_effect("part", *options.part(), why);
  if (options.interleaved()) check_effect("interleaved", *options.interleaved(), why);
  if (options.base()) check_effect("base", *options.base(), why);
}

const json& need(const Fields& fields, const std::string& key) {
  const json& value = get(fields, key);
  TORCH_CHECK_VALUE(!value.is_null(), key, ": expected a value for ",
                    repr(get(fields, "_class_name")), ", got none");
  return value;
}

int64_t head_dim_of(const Fields& fields, const json& row) {
  if (row.contains("head_dim")) {
    const std::string key = text_of(row["head_dim"]);
    return whole(key, need(fields, key));
  }
  const std::string total = text_of(row["quotient"][0]), count = text_of(row["quotient"][1]);
  const int64_t heads = whole(count, need(fields, count));
  TORCH_CHECK_VALUE(heads > 0, count, ": expected a positive number, got ", heads);
  return whole(total, need(fields, total)) / heads;
}

}  // namespace

const json& table() {
  static dispatcher::FirstUse<json> parsed;
  return parsed.get([] { return json::parse(table_text); });
}

RotarySpec named(const std::string& name, std::optional<int64_t> head_dim) {
  TORCH_CHECK_VALUE(head_dim.value_or(1) > 0, "head_dim: expected a positive number, got ",
                    *head_dim);
  Stated stated;
  stated.head_dim = head_dim;
  return specification_of(entry("presets", "name", name), stated);
}

bool is_diffusers(const Fields& fields) { return fields.contains("_class_name"); }

RotarySpec read_diffusers(const Fields& fields, const ConfigurationOptions& options) {
  check_no_options(options);
  const json& row = entry("classes", "_class_name", text_of(get(fields, "_class_name")));
  if (row.contains("needs")) {
    const std::string key = text_of(row["needs"]);
    TORCH_CHECK_VALUE(truthy(need(fields, key)), key, ": is false, so the model does not rotate");
  }
  Stated stated;
  stated.head_dim = head_dim_of(fields, row);
  const auto value_of = [&](const char* name) -> const json& {
    return need(fields, text_of(row[name]));
  };
  if (row.contains("axes")) stated.axes = wholes(text_of(row["axes"]), value_of("axes"));
  if (row.contains("base")) stated.base = real(text_of(row["base"]), value_of("base"));
  if (row.contains("ntk")) stated.ntk = reals(text_of(row["ntk"]), value_of("ntk"));
  return specification_of(entry("presets", "preset", text_of(row["preset"])), stated);
}

}  // namespace posembed::configuration::presets

namespace posembed {

RotarySpec RotarySpec::from_preset(const std::string& name, std::optional<int64_t> head_dim) {
  return configuration::presets::named(name, head_dim);
}

}  // namespace posembed
