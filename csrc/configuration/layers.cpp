#include "configuration/layers.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>

#include "configuration/keys.h"
#include "configuration/limits.h"
#include "configuration/rope_parameters.h"

namespace posembed::configuration {
namespace {

/// The configuration, with the width of full-attention layers if they have their own.
Fields wider(Fields fields, const Kind& kind) {
  if (kind == "full_attention" && truthy(get(fields, "global_head_dim"))) {
    fields["head_dim"] = get(fields, "global_head_dim");
  }
  return fields;
}

Kind kind_of(const json& value) {
  if (value.is_null()) return std::nullopt;
  return value.is_string() ? value.get<std::string>() : repr(value);
}

/// The kinds that a key lists, at most one for each layer.
std::vector<Kind> kinds_of(const Fields& fields, const char* key, std::optional<size_t> length) {
  const json& list = get(fields, key);
  TORCH_CHECK_VALUE(list.is_array(), key, ": expected a list, got ", repr(list, 60));
  std::vector<Kind> kinds;
  for (const json& value : list) kinds.push_back(kind_of(value));
  if (length.has_value() && *length < kinds.size()) kinds.resize(*length);
  return kinds;
}

/// One kind for the layers that a list names, another for the others.
std::vector<Kind> two_kinds(const json& listed, size_t length, const char* in, const char* out) {
  std::vector<Kind> kinds(length, out);
  for (size_t place = 0; place < length; ++place) {
    const auto found = std::find(listed.begin(), listed.end(), json(place));
    if (found != listed.end()) kinds[place] = in;
  }
  return kinds;
}

/// The kind of each layer if the configuration lists them; otherwise empty.
std::vector<Kind> listed_kinds(const Fields& fields, std::optional<size_t> length) {
  const json& scaled = get(fields, "rope_scaling_layers");
  if (!scaled.is_null() && length.has_value() && scaled.size() < *length) {  // Molmo 2
    return two_kinds(scaled, *length, "scaled", "unscaled");
  }
  for (const char* key : {"layer_types", "layers_block_type", "hybrid_layer_types"}) {
    if (truthy(get(fields, key))) return kinds_of(fields, key, length);
  }
  const json& crossing = get(fields, "cross_attention_layers");
  if (truthy(crossing) && length.has_value()) {  // Llama 3.2 Vision: those see images
    return two_kinds(crossing, *length, "cross_attention", "full_attention");
  }
  return {};
}

/// The kinds of layers with rope_parameters of their own.
std::vector<std::string> nested_kinds(const Fields& fields) {
  std::vector<std::string> kinds;
  const Fields rope = legacy(fields);
  for (const auto& each : rope.items()) {
    if (each.value().is_object()) kinds.push_back(each.key());
  }
  return kinds;
}

size_t layer_number(const std::string& text) {
  size_t place = 0;
  const char* end = text.data() + text.size();
  const auto read = std::from_chars(text.data(), end, place);
  TORCH_CHECK_VALUE(read.ec == std::errc() && read.ptr == end,
                    "per_layer_config: expected numbers of layers, got ", repr(json(text)));
  return place;
}

/// The entry of per_layer_config for one layer.
Fields own_fields(const Fields& fields, size_t place) {
  const json& each_own = get(fields, "per_layer_config");
  if (!truthy(each_own)) return Fields::object();
  check_mapping(each_own, "per_layer_config");
  Fields own = Fields::object();
  for (const auto& each : each_own.items()) {
    if (layer_number(each.key()) != place) continue;
    check_mapping(each.value(), "per_layer_config");
    own = each.value();
  }
  return own;
}

}  // namespace

void check_type(std::vector<std::string> kinds, const std::string& layer_type) {
  TORCH_CHECK_VALUE(!kinds.empty(), "layer_type: expected none: there is one kind of layer, got ",
                    repr(json(layer_type)));
  std::sort(kinds.begin(), kinds.end());
  kinds.erase(std::unique(kinds.begin(), kinds.end()), kinds.end());
  const bool known = std::find(kinds.begin(), kinds.end(), layer_type) != kinds.end();
  TORCH_CHECK_VALUE(known, "layer_type: expected one of ", repr(kinds), ", got ",
                    repr(json(layer_type)));
}

bool has_lists(const Fields& fields) {
  return std::any_of(std::begin(by_layer), std::end(by_layer),
                     [&](const auto& keys) { return get(fields, keys.first).is_array(); });
}

std::optional<size_t> count_of_layers(const Fields& fields) {
  for (const char* key : layer_counts) {
    const json& value = get(fields, key);
    if (!truthy(value)) continue;
    const int64_t count = whole(key, value);
    TORCH_CHECK_VALUE(count >= 0, key, ": expected 0 or more, got ", count);
    return static_cast<size_t>(count);
  }
  return std::nullopt;
}

std::vector<Layer> every_layer(const Fields& fields) {
  std::optional<size_t> length = count_of_layers(fields);
  if (!length.has_value() && has_lists(fields)) length = every_list_place(fields).size();
  TORCH_CHECK_VALUE(length.has_value(), "num_hidden_layers: missing in the configuration: it has ",
                    repr(keys_of(fields)));
  std::vector<Kind> kinds = listed_kinds(fields, length);
  TORCH_CHECK_VALUE(!kinds.empty() || nested_kinds(seen_by(fields, 0)).empty(),
                    "layer_types: missing in the configuration, whose layers differ");
  if (kinds.empty()) kinds.resize(*length);
  check_copies(fields, kinds.size());
  std::vector<Layer> layers;
  for (size_t place = 0; place < kinds.size(); ++place) {
    layers.push_back({kinds[place], seen_by(fields, place)});
  }
  return layers;
}

std::vector<Layer> kinds_of_layers(const Fields& fields) {
  const std::optional<size_t> length = count_of_layers(fields);
  std::vector<Layer> layers;
  const std::vector<Kind> kinds = listed_kinds(fields, length);
  check_copies(fields, kinds.size());
  for (size_t place = 0; place < kinds.size(); ++place) {
    layers.push_back({kinds[place], seen_by(fields, place)});
  }
  if (!kinds.empty()) return layers;
  if (has_lists(fields)) {
    for (Fields& own : every_list_place(fields)) layers.push_back({std::nullopt, std::move(own)});
    if (length.has_value() && *length < layers.size()) layers.resize(*length);
    return layers;
  }
  for (const std::string& kind : nested_kinds(fields)) {
    layers.push_back({kind, wider(fields, kind)});
  }
  if (layers.empty()) layers.push_back({std::nullopt, fields});
  return layers;
}

Fields seen_by(const Fields& fields, size_t place) {
  const json& kinds = get(fields, "layer_types");
  const bool listed = kinds.is_array() && place < kinds.size();
  Fields found = wider(fields, listed ? kind_of(kinds[place]) : std::nullopt);
  found = merged(std::move(found), own_fields(fields, place));
  for (const auto& [key, single] : by_layer) {
    const json values = get(found, key);
    if (!values.is_array() || values.empty()) continue;
    found.erase(key);
    found[single] = place < values.size() ? values[place] : json();
  }
  return found;
}

std::vector<Fields> every_list_place(const Fields& fields) {
  size_t length = 0;
  for (const auto& keys : by_layer) {
    const json& values = get(fields, keys.first);
    if (values.is_array()) length = std::max(length, values.size());
  }
  check_copies(fields, length);
  std::vector<Fields> layers;
  for (size_t place = 0; place < std::max<size_t>(length, 1); ++place) {
    layers.push_back(seen_by(fields, place));
  }
  return layers;
}

}  // namespace posembed::configuration
