#include "configuration/completeness.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "configuration/conventions.h"
#include "configuration/layers.h"
#include "configuration/rope_parameters.h"

namespace posembed::configuration {
namespace {

/// Alternative keys: a file that has one of `others` states the value of `names` too.
struct OtherKeys {
  Words names;
  Words others;
};
constexpr OtherKeys other_keys[] = {
    {"partial_rotary_factor", "rotary_pct partial_rotary_factors qk_rope_head_dim"},
    {"rope_parameters", "rope_scaling"},
    {"layer_types", "layers_block_type"},
};

/// The name in completed configurations of a file's key.
std::string completed_name(const std::string& key) {
  if (key == "type") return "rope_type";
  return key == "xdrope_section" ? "mrope_section" : key;
}

bool is_type(const std::string& key) {
  return key.size() >= 4 && key.compare(key.size() - 4, 4, "type") == 0;
}

/// The keys that have a value in a file, at its top level or in rope_parameters.
std::set<std::string> stated_keys(const Fields& fields) {
  std::set<std::string> stated;
  for (const auto& each : fields.items()) {
    const json& value = each.value();
    if (!value.is_null() && value != json::array()) stated.insert(each.key());
  }
  const Fields rope = legacy(seen_by(fields, 0));
  for (const std::string& key : keys_of(rope)) stated.insert(key);
  if (is_nested(rope)) stated.insert({"layer_types", "partial_rotary_factor", "rope_parameters"});
  return stated;
}

bool is_stated(const std::set<std::string>& stated, const std::string& key) {
  if (stated.count(key) > 0) return true;
  const OtherKeys* row = row_of(other_keys, key);
  if (row == nullptr) return false;
  const std::vector<std::string> others = row->others.list();
  return std::any_of(others.begin(), others.end(),
                     [&](const std::string& other) { return stated.count(other) > 0; });
}

using Values = std::map<std::string, json>;  // lists

Values values_of(const Fields& completed) {
  Values values;
  for (const Fields& rope : blocks(legacy(completed))) {
    for (const auto& each : rope.items()) {
      values[completed_name(each.key())].push_back(each.value());
    }
  }
  return values;
}

/// Whether a list contains a value.
bool is_among(const json& value, const json& list) {
  return std::any_of(list.begin(), list.end(),
                     [&](const json& each) { return equal(each, value); });
}

}  // namespace

void check_complete(const Fields& fields) {
  const std::set<std::string> stated = stated_keys(fields);
  const std::string model_type = text_of(get(fields, "model_type"));
  for (const conventions::Rule& rule : conventions::rules_of_classes) {
    TORCH_CHECK_VALUE(!rule.names.has(model_type) || is_stated(stated, rule.key), rule.key,
                      ": missing in the configuration, and the configuration class of '",
                      model_type,
                      "' has a rule of its own for it: add the key, or read the file "
                      "in Python with transformers installed, which completes files");
  }
}

void check_kept(const Fields& given, const Fields& completed) {
  Values kept = values_of(completed);
  for (const Fields& layer : every_list_place(given)) {
    for (const Fields& rope : blocks(legacy(layer))) {
      for (const auto& each : rope.items()) {
        const json& found = kept.emplace(completed_name(each.key()), json::array()).first->second;
        const bool passed_over = !each.value().is_null() && !is_among(each.value(), found);
        TORCH_CHECK_VALUE(!passed_over || is_type(each.key()), each.key(), ": the file has ",
                          repr(each.value()), ", its configuration class takes ", repr(found));
      }
    }
  }
}

}  // namespace posembed::configuration
