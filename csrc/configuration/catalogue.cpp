#include "configuration/catalogue.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "configuration/keys.h"
#include "configuration/layers.h"
#include "configuration/limits.h"
#include "configuration/rope_parameters.h"
#include "configuration/widths.h"
#include "configuration/words.h"
#include "dispatcher/first_use.h"

namespace posembed::configuration::catalogue {
namespace {

constexpr const char* generated =
#include "configuration/catalogue.inc"
    ;
constexpr const char* kept_by_hand =
#include "configuration/models.inc"
    ;

json all_types() {
  const json found = json::parse(generated);
  json types = found["types"];
  for (const auto& each : found["instead"].items()) {
    for (const std::string name : each.value()) types[name]["instead"] = each.key();
  }
  const json own = json::parse(kept_by_hand)["types"];
  for (const auto& each : own.items()) types[each.key()].merge_patch(each.value());
  return types;
}

/// Keys that may be absent in a file that has one of `others`.
struct OtherKeys {
  Words names;
  Words others;
};
constexpr OtherKeys other_keys[] = {
    {"rotary_pct partial_rotary_factor",
     "partial_rotary_factor rotary_pct partial_rotary_factors rotary_dim"},
    {"rope_parameters", "rope_scaling"},
    {"rope_theta", "rotary_emb_base rotary_embedding_base"},
    {"layer_types", "layers_block_type"},
};

/// Keys whose null means the same as their absence, in every class.
constexpr Words defaults_to_none = R"(
layer_rope_theta layer_types layers_block_type mlp_layer_types no_rope_layers rope_parameters
rope_scaling
)";

/// The keys that a file states, at its top level or in rope_parameters.
std::set<std::string> stated_keys(const Fields& fields) {
  std::set<std::string> stated;
  for (const auto& each : fields.items()) {
    const bool is_none =
        each.value().is_null() || (each.key() == "no_rope_layers" && each.value().empty());
    if (!is_none || !defaults_to_none.has(each.key())) stated.insert(each.key());
  }
  for (const char* name : {"rope_parameters", "rope_scaling"}) {
    const json& rope = get(fields, name);
    if (!rope.is_object()) continue;
    const bool nested = is_nested(rope);
    if (nested || !get(rope, "rope_theta").is_null()) {
      for (const std::string& base : all_bases()) stated.insert(base);
    }
    if (nested || !get(rope, "partial_rotary_factor").is_null()) {
      stated.insert({"partial_rotary_factor", "rotary_pct"});
    }
    for (const std::string& key : keys_of(rope)) stated.insert(key);
  }
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

/// The class's own names of keys.
void rename(Fields& fields, const json& names) {
  for (const auto& each : names.items()) {
    const json given = get(fields, each.key());
    if (given.is_null()) continue;
    const std::string name = each.value().get<std::string>();
    fields[name] = same(name, {get(fields, name), given});
    fields.erase(each.key());
  }
}

void check_needs(const Fields& fields, const json& needs) {
  for (const auto& need : needs.items()) {
    const std::string other = need.value().get<std::string>();
    TORCH_CHECK_VALUE(!fields.contains(need.key()) || fields.contains(other), other,
                      ": missing in the configuration, which has ", need.key(),
                      ": the class of the model takes both");
  }
}

// ------------------------------------------------------------------------- kinds of layers' blocks

/// A flat rope_scaling, with what the class adds to it.
json with_added(json scaling, const json& added) {
  const json& type =
      scaling.contains("rope_type") ? get(scaling, "rope_type") : get(scaling, "type");
  if (type != "yarn" || !added.is_object()) return scaling;
  json found = added;
  found.update(scaling);
  return found;
}

/// Writes a flat key into the blocks of the kinds that take it.
void write(json& blocks, const std::string& key, const json& value, const json& kinds) {
  for (const json& kind : kinds) {
    json& block = blocks[kind.get<std::string>()];
    if (!value.is_object()) {
      block["rope_theta"] = value;
      continue;
    }
    check_mapping(value, key);
    block.update(value);
  }
}

/// rope_parameters of a class with an entry for each kind of layer.
void complete_kinds(Fields& fields, const json& blocks, const json& takers, const json& added) {
  const json& given = get(fields, "rope_parameters");
  if (truthy(given) && (!given.is_object() || is_nested(given))) return;
  json found = blocks;
  if (truthy(get(fields, "qk_rope_head_dim")) || !get(fields, "partial_rotary_factor").is_null()) {
    for (json& block : found) {  // the file's own width
      if (block.is_object()) block.erase("partial_rotary_factor");
    }
  }
  for (const std::string name : {"rope_parameters", "rope_scaling"}) {
    const json value = get(fields, name);
    if (!truthy(value)) continue;
    TORCH_CHECK_VALUE(takers.contains(name) && value.is_object(), name,
                      ": expected an entry for each of ", repr(keys_of(blocks)), ", got ",
                      repr(value));
    if (is_nested(value)) return;
    write(found, name, with_added(value, added), takers[name]);
    if (takers.contains("older_type") && value.contains("type")) {
      write(found, name, {{"rope_type", value["type"]}}, takers[name]);
    }
    fields.erase(name);
  }
  for (const auto& taker : takers.items()) {
    const json value = get(fields, taker.key());
    if (value.is_null() || value.is_object()) continue;
    write(found, taker.key(), value, taker.value());
    fields.erase(taker.key());
  }
  fields["rope_parameters"] = found;
}

// --------------------------------------------------------------------------------- lists of layers

json repeated(const json& layers, size_t length) {
  json found = json::array();
  while (found.size() < length) found.push_back(layers[found.size() % layers.size()]);
  return found;
}

/// The cycle of another period, in which the first or the last layer differs.
json with_period(const json& cycle, const std::string& key, const json& period) {
  const int64_t length = whole(key, period);
  TORCH_CHECK_VALUE(length > 0 && length <= static_cast<int64_t>(most_layers), key,
                    ": expected a number of layers, got ", repr(period));
  const bool is_first = cycle[0] != cycle[1];
  json found = repeated(json::array({cycle[is_first ? 1 : 0]}), static_cast<size_t>(length));
  (is_first ? found.front() : found.back()) = is_first ? cycle.front() : cycle.back();
  return found;
}

/// The layers of a rule, without what other keys change.
json plain(const json& rule, size_t length) {
  json cycle = get(rule, "cycle");
  json found = get(rule, "first").is_null() ? json::array() : get(rule, "first");
  if (found.size() > length) found.erase(found.begin() + static_cast<int64_t>(length), found.end());
  const json rest = repeated(cycle, length - found.size());
  found.insert(found.end(), rest.begin(), rest.end());
  if (truthy(get(rule, "from_end"))) std::reverse(found.begin(), found.end());
  if (rule.contains("last") && length > 0) found.back() = rule["last"];
  return found;
}

/// The layers that follow from another list of the file.
json following(const Fields& fields, const json& rule) {
  const json& others = get(fields, text_of(get(rule, "by")));
  if (!others.is_array()) return nullptr;
  json found = json::array();
  for (const json& other : others) {
    const std::string name = other.is_string() ? text_of(other) : other.dump();
    if (!rule["values"].contains(name)) return nullptr;
    found.push_back(rule["values"][name]);
  }
  return found;
}

/// Sets layers from a key that has an entry for each, names some of them, or counts the first.
void change(json& layers, const Fields& fields, const json& rule) {
  for (const auto& each : get(rule, "each").items()) {
    const json& numbers = get(fields, each.key());
    if (!numbers.is_array()) continue;
    for (size_t place = 0; place < std::min(layers.size(), numbers.size()); ++place) {
      const std::string number = numbers[place].dump();
      TORCH_CHECK_VALUE(each.value().contains(number), each.key(), ": expected one of ",
                        repr(keys_of(each.value())), " for each layer, got ", repr(numbers, 60));
      layers[place] = each.value()[number];
    }
  }
  for (const auto& listed : get(rule, "listed").items()) {
    const json& places = get(fields, listed.key());
    if (!places.is_array()) continue;
    for (size_t place = 0; place < layers.size(); ++place) {
      const bool is_in = std::find(places.begin(), places.end(), json(place)) != places.end();
      layers[place] = listed.value()[is_in ? 0 : 1];
    }
  }
  for (const auto& leading : get(rule, "leading").items()) {
    const json& count = get(fields, leading.key());
    if (count.is_null()) continue;
    const int64_t most = std::min(whole(leading.key(), count), static_cast<int64_t>(layers.size()));
    std::fill(layers.begin(), layers.begin() + std::max<int64_t>(most, 0), leading.value());
  }
}

/// Whether all layers are of one kind, as long as other keys do not say otherwise.
bool is_uniform(const json& rule) {
  const json& cycle = get(rule, "cycle");
  return cycle.size() == 1 && !rule.contains("first") && !rule.contains("last");
}

/// The list of a rule for a file; null if only the class knows.
json layers_of(const Fields& fields, const std::string& key, json rule) {
  if (rule.is_array()) return rule;
  if (rule.contains("by")) return following(fields, rule);
  const std::optional<size_t> length = count_of_layers(fields);
  if (!length.has_value()) return nullptr;
  bool is_known = *length >= rule.value("least", size_t{0});
  for (const auto& other : get(rule, "unless").items()) {
    const json& given = get(fields, other.key());
    is_known = is_known && (given.is_null() || equal(given, other.value()));
  }
  if (!is_known && is_uniform(rule)) return nullptr;
  TORCH_CHECK_VALUE(is_known, key, ": missing in the configuration, and its class derives it from ",
                    repr(keys_of(get(rule, "unless"))), ": add the key");
  for (const json& name : get(rule, "period")) {
    const json& period = get(fields, text_of(name));
    if (!period.is_null()) rule["cycle"] = with_period(rule["cycle"], text_of(name), period);
  }
  json layers = plain(rule, *length);
  change(layers, fields, rule);
  return layers;
}

/// A head that is several times as wide as the model divided by its heads.
json times(const Fields& fields, const json& factor) {
  Fields other = fields;
  other.erase("attention_head_dim");
  other.erase("kv_channels");
  Keys config(other, "the configuration");
  return head_width(config) * factor.get<int64_t>();
}

/// Defaults in the order in which they follow from each other.
enum Default { shared, constant, of_head, list, following_list };

Default order_of(const std::string& key, const json& value) {
  if (key == "rope_parameters") return shared;
  if (!value.is_object()) return constant;
  if (value.contains("times")) return of_head;
  if (value.contains("by")) return following_list;
  return value.contains("cycle") ? list : constant;
}

json default_of(const Fields& fields, const std::string& key, const json& value, Default kind) {
  if (kind == constant) return value;
  return kind == of_head ? times(fields, value["times"]) : layers_of(fields, key, value);
}

/// Whether a key is the number of layers.
bool is_count(const std::string& key) {
  return std::find(std::begin(layer_counts), std::end(layer_counts), key) != std::end(layer_counts);
}

/// The keys of a text model beside the configurations of other parts, as in older files.
Fields without_parts(const Fields& fields) {
  Fields flat = Fields::object();
  for (const auto& each : fields.items()) {
    if (!each.value().is_object() || each.key().rfind("rope_", 0) == 0) {
      flat[each.key()] = each.value();
    }
  }
  flat.erase("model_type");
  return flat;
}

bool has_sizes(const Fields& flat) {
  return !get(flat, "hidden_size").is_null() && !get(flat, "num_attention_heads").is_null();
}

}  // namespace

const json& types() {
  static dispatcher::FirstUse<json> parsed;
  return parsed.get(all_types);
}

json source() { return json::parse(generated)["source"]; }

const json& of(const std::string& model_type) {
  static dispatcher::FirstUse<json> nothing;
  const auto found = types().find(model_type);
  return found == types().end() ? nothing.get([] { return json::object(); }) : *found;
}

const json& of(const Fields& fields) { return of(text_of(get(fields, "model_type"))); }

Fields completed(Fields fields) {
  const json& own = of(fields);
  const json& defaults = get(own, "defaults");
  if (!defaults.is_object()) return fields;
  rename(fields, get(own, "names"));
  check_needs(fields, get(own, "needs"));
  if (own.contains("kinds")) {
    const bool is_by_layer = get(fields, "rope_theta").is_array();  // has each layer's base already
    if (!is_by_layer) {
      complete_kinds(fields, defaults["rope_parameters"], own["kinds"], get(own, "with_yarn"));
    }
  } else if (defaults.contains("rope_parameters") &&
             (own.contains("passed_over") || !is_stated(stated_keys(fields), "rope_parameters"))) {
    json& rope = fields["rope_parameters"];
    if (!truthy(rope)) rope = defaults["rope_parameters"];
  }
  const std::set<std::string> stated = stated_keys(fields);
  for (const Default kind : {constant, of_head, list, following_list}) {
    for (const auto& each : defaults.items()) {
      if (order_of(each.key(), each.value()) != kind || is_stated(stated, each.key())) continue;
      if (has_lists(fields) && is_count(each.key())) continue;  // the lists have their own length
      const json value = default_of(fields, each.key(), each.value(), kind);
      if (!value.is_null()) fields[each.key()] = value;
    }
  }
  return fields;
}

void check_kinds(const Fields& fields) {
  const json& own = of(fields);
  if (!own.contains("kinds")) return;
  const json& rope = get(fields, "rope_parameters");
  TORCH_CHECK_VALUE(!rope.is_object() || is_nested(rope), "rope_parameters: expected an entry for ",
                    "each of ", repr(keys_of(own["defaults"]["rope_parameters"])), ", got ",
                    repr(rope));
  if (!rope.is_object()) return;
  const json& kinds = get(fields, "layer_types");
  for (const auto& each : own["defaults"]["rope_parameters"].items()) {
    const bool is_used = each.value().is_object() &&
                         std::find(kinds.begin(), kinds.end(), json(each.key())) != kinds.end();
    TORCH_CHECK_VALUE(!is_used || rope.contains(each.key()), "rope_parameters: expected an entry ",
                      "for ", repr(json(each.key())), ", got ", repr(keys_of(rope)));
  }
}

std::set<std::string> known(const Fields& fields) {
  std::set<std::string> names;
  for (const json& name : get(of(fields), "known")) names.insert(name);
  return names;
}

Fields with_parts(Fields fields) {
  const Fields flat = without_parts(fields);
  for (const auto& part : get(of(fields), "parts").items()) {
    json& nested = fields[part.key()];
    if (nested.is_null() && part.key() == "text_config" && has_sizes(flat)) nested = flat;
    if (nested.is_null()) nested = part.value();
    if (nested.is_object() && get(nested, "model_type").is_null()) {
      nested["model_type"] = part.value()["model_type"];
    }
  }
  return fields;
}

}  // namespace posembed::configuration::catalogue
