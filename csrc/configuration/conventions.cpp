#include "configuration/conventions.h"

#include <algorithm>

namespace posembed::configuration::conventions {
namespace {

/// The model types in any of these tables.
std::vector<std::string> in_any(const std::vector<Words>& tables) {
  std::vector<std::string> all;
  for (const Words& table : tables) {
    const std::vector<std::string> some = table.list();
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

/// A table's rows as JSON, by model type.
template <typename Row, size_t length, typename Value>
json by_type(const Row (&rows)[length], const Value& value) {
  json object = json::object();
  for (const Row& row : rows) {
    for (const std::string& name : row.names.list()) object[name] = value(row);
  }
  return object;
}

json all_bases() {
  json bases = json::object();
  for (const std::string& name : in_any({fixed_bases[0].names, height_then_width})) {
    const std::optional<double> base = fixed_base(name);
    if (base.has_value()) bases[name] = *base;
  }
  return bases;
}

json all_rules() {
  json rules = json::object();
  for (const Rule& rule : rules_of_classes) rules[rule.key] = rule.names.list();
  return rules;
}

json lists() {
  return {{"half_split", half_split.list()},
          {"interleaved", interleaved.list()},
          {"by_key", by_key.list()},
          {"rotated_without_window", rotated_without_window.list()},
          {"rotated_if_sliding", rotated_if_sliding.list()},
          {"scaled_if_full", scaled_if_full.list()},
          {"doubled_ntk", doubled_ntk.list()},
          {"reversed", reversed.list()},
          {"trailing", trailing.list()},
          {"unrotated", unrotated.list()},
          {"height_then_width", height_then_width.list()},
          {"width_then_height", width_then_height.list()},
          {"width_and_height_in_turns", width_and_height_in_turns.list()},
          {"time_height_width", time_height_width.list()},
          {"whole_grid", whole_grid.list()},
          {"normalised_grid", normalised_grid.list()},
          {"window_of_axis", window_of_axis.list()},
          {"shared_series", shared_series.list()},
          {"interleaved_axial", interleaved_axial.list()},
          {"alternating_axes", alternating_axes.list()}};
}

}  // namespace

bool is_axial(const std::string& model_type) {
  const Words axial[] = {height_then_width, width_then_height, width_and_height_in_turns,
                         time_height_width, whole_grid,        normalised_grid,
                         shared_series,     interleaved_axial};
  return std::any_of(std::begin(axial), std::end(axial),
                     [&](const Words& table) { return table.has(model_type); });
}

std::optional<double> fixed_base(const std::string& model_type) {
  if (const Base* row = row_of(fixed_bases, model_type)) return row->base;
  if (height_then_width.has(model_type) && model_type != "lfm3_vl_vision") return 10000.0;
  return std::nullopt;
}

json tables() {
  json all = lists();
  const auto sizes = [](const AxisSizes& row) { return row.sizes; };
  all["contiguous_sections"] = by_type(contiguous_sections, sizes);
  all["interleaved_sections"] = by_type(interleaved_sections, sizes);
  all["time_last"] = by_type(time_last, sizes);
  all["optional_sections"] =
      by_type(optional_sections, [](const OptionalSections& row) { return row.in_turns; });
  all["default_parts"] = by_type(default_parts, [](const Part& row) { return row.part; });
  all["learned_scales"] = by_type(learned_scales, [](const auto& row) { return row.tensor; });
  all["unsupported"] = by_type(unsupported, [](const Unsupported& row) { return row.reason; });
  all["switches"] = by_type(switches, [](const Switch& row) {
    return json({{"key", row.key},
                 {"otherwise", json::parse(row.otherwise)},
                 {"rotating", json::parse(row.rotating)}});
  });
  all["fixed_bases"] = all_bases();
  all["rules_of_classes"] = all_rules();
  return all;
}

}  // namespace posembed::configuration::conventions
