#include "configuration/completeness.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <string>

#include "configuration/layers.h"
#include "configuration/rope_parameters.h"

namespace posembed::configuration {
namespace {

/// The name in completed configurations of a file's key.
std::string completed_name(const std::string& key) {
  if (key == "type") return "rope_type";
  return key == "xdrope_section" ? "mrope_section" : key;
}

bool is_type(const std::string& key) {
  return key.size() >= 4 && key.compare(key.size() - 4, 4, "type") == 0;
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
