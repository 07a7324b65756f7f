#include "configuration/huggingface.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "configuration/axes.h"
#include "configuration/catalogue.h"
#include "configuration/keys.h"
#include "configuration/layers.h"
#include "configuration/parts.h"
#include "configuration/rope_parameters.h"
#include "configuration/scalings.h"
#include "configuration/unknown_keys.h"
#include "configuration/widths.h"
#include "configuration/words.h"

namespace posembed::configuration::huggingface {
namespace {

using Layers = std::vector<Layer>;
using Specs = std::vector<std::optional<RotarySpec>>;

/// The caller's options, in addition to the configuration.
struct Stated {
  const ConfigurationOptions& options;
  const std::set<std::string>& accounted;
};

json as_json(const std::optional<double>& value) {
  return value.has_value() ? json(*value) : json();
}
json as_json(const std::optional<bool>& value) { return value.has_value() ? json(*value) : json(); }

RotarySpec without_rotation(int64_t head_dim) {
  RotarySpec spec(head_dim);
  spec.rotary_dim = 0;
  spec.check();
  return spec;
}

// ---------------------------------------------------------------------------------------- one
// layer

/// Whether layers without a sliding window rotate.
bool rotates_beside_window(Keys& config, const json& rules) {
  if (get(rules, "rotates") == "sliding_attention_if_windowed") {
    return !truthy(config.take("sliding_window"));
  }
  const bool dense = config.take("mlp_layer_types") == "dense";  // Cohere's first layers
  return dense && equal(config.take("prefix_dense_sliding_window_pattern"), 1);
}

/// Whether layers of a kind rotate in no model.
bool never_rotates(const Kind& kind) {
  return kind.has_value() && (kind == "cross_attention" || without_attention.has(*kind));
}

/// Whether a layer rotates at all.
bool rotates(Keys& config, const json& rules, const Kind& kind) {
  const json& key = get(rules, "switch");
  if (!key.is_null()) {
    const json given = config.take(text_of(get(key, "key")), get(key, "otherwise"));
    if (!equal(given, get(key, "rotating"))) return false;
  }
  if (!truthy(config.take("use_rotary_embedding", true))) return false;
  const bool is_part = rules.contains("head");
  if (never_rotates(kind) && !is_part) return false;
  if (equal(config.take("use_rope_layers", true), 0)) return false;
  if (equal(config.take("no_rope_layers"), 0)) return false;  // 1: rotated
  if (equal(own_base(config), 0)) return false;
  if (!rules.contains("rotates") || kind == "sliding_attention") return true;
  return rotates_beside_window(config, rules);
}

/// rope_theta, or the base in the model's code.
double base_of(Keys& config, Keys& rope, const json& rules, const std::optional<double>& stated) {
  const json theta = rope.take("rope_theta"), own = own_base(config);
  const json base = same("rope_theta", {own.is_null() ? theta : own, as_json(stated)});
  if (!base.is_null()) return base_number("rope_theta", base);
  if (rules.contains("base")) return real("base", get(rules, "base"));
  std::vector<std::string> parts;
  for (const std::string& key : keys_of(config.fields())) {
    if (key.size() >= 7 && key.substr(key.size() - 7) == "_config") parts.push_back(key);
  }
  TORCH_CHECK_VALUE(false, "rope_theta: missing in the configuration",
                    parts.empty() ? "" : ": pass part= of " + repr(parts));
}

/// rope_interleave, or the caller's option; without either, such models are interleaved.
bool interleaved_by_key(Keys& config, const std::optional<bool>& stated) {
  const char* key = "rope_interleave";
  const bool may_lack = stated.has_value() || !config.has(key);
  const json given = may_lack ? config.take(key) : config.need(key);
  return given.is_null() ? stated.value_or(true) : truthy(given);
}

/// Whether the name that `convert` wrote means interleaved pairs.
bool is_named_interleaved(const json& pairing) {
  TORCH_CHECK_VALUE(pairing == "interleaved" || pairing == "half_split", catalogue::converted,
                    ": expected 'interleaved' or 'half_split', got ", repr(pairing));
  return pairing == "interleaved";
}

/// Which components form a pair: as written by `convert`, or as known for the model type.
bool is_interleaved(Keys& config, const json& rules, const std::optional<bool>& stated) {
  const std::string pairing = text_of(get(rules, "pairing"));
  if (rules.contains("head")) {  // a part of a layer, of which the file's keys do not speak
    config.ignore({catalogue::converted, "rope_interleave"});
    return truthy(same("interleaved", {as_json(stated), pairing == "interleaved"}));
  }
  const json converted = config.take(catalogue::converted);
  if (!converted.is_null()) {
    config.ignore({"rope_interleave"});  // the pairing before conversion
    return truthy(same("interleaved", {as_json(stated), is_named_interleaved(converted)}));
  }
  const bool known =
      pairing == "rope_interleave" ? interleaved_by_key(config, stated) : pairing == "interleaved";
  return truthy(same("interleaved", {as_json(stated), known, config.take("rope_interleave")}));
}

/// LeRoPE: frequencies times the exponential of a tensor that only the checkpoint has.
RotarySpec with_learned_scale(const RotarySpec& spec, Keys& config, const std::string& tensor) {
  const json alpha = config.take(tensor);
  TORCH_CHECK_VALUE(!alpha.is_null(), tensor,
                    ": missing: frequencies are learned; pass the checkpoint's values among the ",
                    "configuration's keys, {**config.to_dict(), '", tensor, "': [...]}");
  std::vector<double> divisors = reals(tensor, alpha);
  for (double& divisor : divisors) divisor = std::exp(-divisor);
  const std::optional<int64_t> length = original_length_of(spec.scaling);
  const char* key = "max_position_embeddings";
  return divided(spec, divisors, length.has_value() ? *length : whole(key, config.need(key)));
}

/// Sets base and widths. If the width is odd, exponents use the odd width.
void set_series(RotarySpec& spec, double base, const Widths& widths) {
  const bool odd = widths.rotary_dim % 2 != 0 && widths.rotary_dim < widths.head_dim;
  TORCH_CHECK_VALUE(!odd || std::holds_alternative<std::monostate>(spec.scaling),
                    "partial_rotary_factor: expected an even width, got ", widths.rotary_dim);
  check_rotated(widths.rotary_dim);  // before axes take memory for each pair
  spec.head_dim = widths.head_dim;
  spec.rotary_dim = widths.rotary_dim + (odd ? 1 : 0);
  const auto even = static_cast<double>(spec.rotary_dim);
  spec.base = odd ? std::pow(base, even / static_cast<double>(widths.rotary_dim)) : base;
}

/// The widths of a part of a layer: that of its head is a key of its own.
Widths widths_of_part(Keys& config, Keys& rope, const json& rules) {
  std::string key;
  for (const json& name : get(rules, "head")) {  // the first that the configuration has
    key = text_of(name);
    if (config.has(key)) break;
  }
  const int64_t head_dim = whole(key, config.need(key));
  if (!rules.contains("partial")) return {head_dim, widths_of(config, rope, rules).rotary_dim};
  const json part = same("partial_rotary_factor", {rope.take("partial_rotary_factor"),
                                                   config.take("partial_rotary_factor")});
  const double factor = part.is_null() ? 1.0 : real("partial_rotary_factor", part);
  config.ignore({"qk_rope_head_dim", "qk_nope_head_dim"});
  return {head_dim, static_cast<int64_t>(static_cast<double>(head_dim) * factor)};
}

/// The specification from a model's keys and the rope_parameters of one kind of layer.
RotarySpec rotation(Keys& config, Keys& rope, const json& rules, const Stated& stated,
                    const std::optional<std::string>& axis) {
  RotarySpec spec(0);
  const double base = base_of(config, rope, rules, stated.options.base());
  spec.scaling = read_scaling(rope, config);
  const bool is_part = rules.contains("head");
  set_series(spec, base,
             is_part ? widths_of_part(config, rope, rules) : widths_of(config, rope, rules));
  spec.interleaved = is_interleaved(config, rules, stated.options.interleaved());
  spec.reverse = rules.contains("reversed");
  const int64_t head_dim = spec.head_dim, rotary_dim = spec.rotary_dim;
  const std::string grid = text_of(get(rules, "grid"));
  if (grid == "window_of_axis") {
    set_window_of_axis(spec, axis);
  } else if (!grid.empty()) {
    set_axes_of_tower(spec, config, grid);
  } else {
    spec.sections = sections_of_text(rope, get(rules, "axes"), rotary_dim / 2);
  }
  if (rules.contains("trailing")) spec.rotary_start = head_dim - rotary_dim;
  spec.check();
  const std::string tensor = text_of(get(rules, "learned_scale"));
  return tensor.empty() ? spec : with_learned_scale(spec, config, tensor);
}

/// The part of a layer that is asked for: the attention, unless a part has the name of the layer's
/// kind.
std::string part_of(const Layer& layer, const json& parts, const Stated& stated) {
  const std::string asked = layer_part(stated.options.part()).value_or("attention");
  if (asked == "attention") {
    return layer.kind.has_value() && parts.contains(*layer.kind) ? *layer.kind : asked;
  }
  json known = keys_of(parts);
  known.insert(known.begin(), "attention");
  TORCH_CHECK_VALUE(parts.contains(asked), "part: expected one of ", repr(known), ", got ",
                    repr(json(asked)));
  return asked;
}

/// The rules of that part; std::nullopt if the layer has none.
std::optional<json> rules_of_part(const Layer& layer, const Stated& stated) {
  json rules = catalogue::of(layer.fields);
  const json parts = rules.value("layer_parts", json::object());
  const std::string name = part_of(layer, parts, stated);
  if (name == "attention") return rules;
  const json& own = parts.at(name);
  const json& kinds = get(own, "kinds");
  const bool has_part =
      kinds.is_null() || (layer.kind.has_value() &&
                          std::find(kinds.begin(), kinds.end(), json(*layer.kind)) != kinds.end());
  const json& key = get(own, "if_stated");
  if (!has_part || (!key.is_null() && !layer.fields.contains(text_of(key)))) return std::nullopt;
  rules.erase("trailing");
  rules.update(own);
  return rules;
}

/// Rejects keys that may concern positions, unless they are known not to.
void check_all_understood(Keys& config, const Stated& stated) {
  config.ignore({"global_head_dim", "max_position_embeddings", "per_layer_config"});
  for (const auto& keys : by_layer) config.ignore({keys.first});
  for (const char* key : layer_counts) config.ignore({key});
  if (config.has("no_rope_layers")) config.ignore({"no_rope_layer_interval"});
  check_understood(config, stated.accounted, stated.options.ignore());
}

/// The specification of one layer; std::nullopt if it does not rotate.
std::optional<RotarySpec> of_layer(const Layer& layer, const Stated& stated,
                                   const std::optional<std::string>& axis = std::nullopt) {
  Keys config(layer.fields, "the configuration");
  const std::optional<json> rules = rules_of_part(layer, stated);
  if (!rules.has_value() || !rotates(config, *rules, layer.kind)) return std::nullopt;
  std::optional<Keys> rope = parameters(config, layer.kind);
  if (!rope.has_value()) return std::nullopt;
  RotarySpec spec = rotation(config, *rope, *rules, stated, axis);
  spec.check();
  check_all_understood(config, stated);
  rope->done();
  return spec;
}

// --------------------------------------------------------------------------------------- all
// layers

bool alike(const Layer& left, const Layer& right) {
  return left.kind == right.kind && left.fields == right.fields;
}

/// The specification of each layer; layers with the same keys are read once.
Specs of_layers(const Layers& found, const Stated& stated) {
  Specs specs;
  for (const Layer& layer : found) {
    size_t before = 0;
    while (before < specs.size() && !alike(found[before], layer)) ++before;
    specs.push_back(before < specs.size() ? specs[before] : of_layer(layer, stated));
  }
  return specs;
}

/// The layers of one kind, and of one base if each layer has its own.
Layers chosen_layers(Layers found, const ConfigurationOptions& options) {
  if (options.layer_type().has_value()) {
    std::vector<std::string> kinds;
    for (const Layer& layer : found) {
      if (layer.kind.has_value()) kinds.push_back(*layer.kind);
    }
    check_type(kinds, *options.layer_type());
    found.erase(
        std::remove_if(found.begin(), found.end(),
                       [&](const Layer& each) { return each.kind != options.layer_type(); }),
        found.end());
  }
  if (!options.base().has_value()) return found;
  Layers with_base;
  for (const Layer& layer : found) {
    if (equal(get(layer.fields, "layer_rope_theta"), *options.base())) with_base.push_back(layer);
  }
  return with_base.empty() ? found : with_base;
}

/// Throws an error that says why these layers have no common specification.
[[noreturn]] void refuse_differing(const Layers& found, const std::optional<std::string>& asked) {
  std::set<std::string> kinds;
  std::set<json> bases;
  for (const Layer& layer : found) {
    if (layer.kind.has_value()) kinds.insert(*layer.kind);
    const json& base = get(layer.fields, "layer_rope_theta");
    if (truthy(base)) bases.insert(base);
  }
  TORCH_CHECK_VALUE(asked.has_value() || kinds.size() < 2, "layer_type: expected one of ",
                    repr(json(kinds)), ", got None");
  TORCH_CHECK_VALUE(bases.size() < 2, "layer_rope_theta: layers differ: pass base= of ",
                    repr(json(bases)));
  TORCH_CHECK_VALUE(false, "layer_type: layers of one kind differ: use RotarySpec.for_layers");
}

/// The entry of a model type that rotates.
const json& rules_of(const Fields& fields) {
  check_supported(fields);
  const json& rules = catalogue::of(fields);
  const std::string name = "model_type " + repr(get(fields, "model_type"));
  TORCH_CHECK_VALUE(!rules.contains("instead"), name, " does not rotate: it has ",
                    text_of(get(rules, "instead")));
  TORCH_CHECK_VALUE(rules.contains("pairing") || rules.contains("unrotated"), name,
                    " is not known: describe its rotation in full with RotarySpec, from the ",
                    "model's code: head_dim, base, rotary_dim, pairing (interleaved), scaling and ",
                    "sections, one for each kind of layer, and which layers rotate");
  return rules;
}

/// The distinct rotations of the layers.
std::vector<RotarySpec> different(const Specs& specs) {
  std::vector<RotarySpec> found;
  for (const auto& spec : specs) {
    if (spec.has_value() && std::find(found.begin(), found.end(), *spec) == found.end()) {
      found.push_back(*spec);
    }
  }
  return found;
}

}  // namespace

RotarySpec read(const Fields& fields, const ConfigurationOptions& options,
                const std::set<std::string>& accounted) {
  const json& rules = rules_of(fields);
  const Stated stated{options, accounted};
  Keys config(fields, "the configuration");
  if (rules.contains("unrotated")) return without_rotation(latent_width(config));
  if (get(rules, "grid") == "window_of_axis") {
    return of_layer({std::nullopt, fields}, stated, options.layer_type()).value();
  }
  const Layers found = chosen_layers(kinds_of_layers(fields), options);
  const std::vector<RotarySpec> rotating = different(of_layers(found, stated));
  if (rotating.size() == 1) return rotating.front();
  if (!rotating.empty()) refuse_differing(found, options.layer_type());
  TORCH_CHECK_VALUE(!options.layer_type().has_value(), "layer_type: layers of kind ",
                    repr(json(options.layer_type().value_or(""))), " do not rotate");
  return without_rotation(head_width(config));
}

Specs read_layers(const Fields& fields, const ConfigurationOptions& options,
                  const std::set<std::string>& accounted) {
  const json& rules = rules_of(fields);
  const Layers every = every_layer(fields);
  if (rules.contains("unrotated")) return Specs(every.size());
  return of_layers(every, {options, accounted});
}

void check_supported(const Fields& fields) {
  const json& why = get(catalogue::of(fields), "refused");
  TORCH_CHECK_VALUE(why.is_null(), "model_type ", repr(get(fields, "model_type")), ": ",
                    text_of(why));
}

}  // namespace posembed::configuration::huggingface
