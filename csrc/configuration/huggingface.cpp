#include "configuration/huggingface.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "configuration/axes.h"
#include "configuration/conventions.h"
#include "configuration/keys.h"
#include "configuration/layers.h"
#include "configuration/rope_parameters.h"
#include "configuration/scalings.h"
#include "configuration/unknown_keys.h"
#include "configuration/widths.h"
#include "core/brief.h"

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
bool rotates_beside_window(Keys& config, const std::string& model_type) {
  if (conventions::rotated_without_window.has(model_type)) {
    return !truthy(config.take("sliding_window"));
  }
  const bool dense = config.take("mlp_layer_types") == "dense";  // Cohere's first layers
  return dense && equal(config.take("prefix_dense_sliding_window_pattern"), 1);
}

/// Whether a layer rotates at all.
bool rotates(Keys& config, const std::string& model_type, const Kind& kind) {
  if (const auto* row = row_of(conventions::switches, model_type)) {
    const json given = config.take(row->key, json::parse(row->otherwise));
    if (!equal(given, json::parse(row->rotating))) return false;
  }
  if (!truthy(config.take("use_rotary_embedding", true))) return false;
  if (kind.has_value() && conventions::without_rotation.has(*kind)) return false;
  if (equal(config.take("use_rope_layers", true), 0)) return false;
  if (equal(config.take("no_rope_layers"), 0)) return false;  // 1: rotated
  if (equal(own_base(config), 0)) return false;
  const bool by_window = conventions::rotated_if_sliding.has(model_type) ||
                         conventions::rotated_without_window.has(model_type);
  if (!by_window || kind == "sliding_attention") return true;
  return rotates_beside_window(config, model_type);
}

/// rope_theta, or the base in the model's code.
double base_of(Keys& config, Keys& rope, const std::string& model_type,
               const std::optional<double>& stated) {
  const json theta = rope.take("rope_theta"), own = own_base(config);
  const json base = same("rope_theta", {own.is_null() ? theta : own, as_json(stated)});
  if (!base.is_null()) return real("rope_theta", base);
  const std::optional<double> fixed = conventions::fixed_base(model_type);
  if (fixed.has_value()) return *fixed;
  std::vector<std::string> parts;
  for (const std::string& key : keys_of(config.fields())) {
    if (key.size() >= 7 && key.substr(key.size() - 7) == "_config") parts.push_back(key);
  }
  TORCH_CHECK_VALUE(false, "rope_theta: missing in the configuration: pass base=",
                    parts.empty() ? "" : ", or part= of " + repr(parts));
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
  TORCH_CHECK_VALUE(pairing == "interleaved" || pairing == "half_split", conventions::converted,
                    ": expected 'interleaved' or 'half_split', got ", repr(pairing));
  return pairing == "interleaved";
}

/// The known pairing of a model type; null for unknown types.
json known_pairing(Keys& config, const std::string& model_type, const std::optional<bool>& stated) {
  if (conventions::by_key.has(model_type)) return interleaved_by_key(config, stated);
  if (conventions::interleaved.has(model_type)) return true;
  if (conventions::interleaved_axial.has(model_type)) return true;
  if (conventions::half_split.has(model_type) || conventions::is_axial(model_type)) return false;
  return nullptr;
}

/// Which components form a pair: as written by `convert`, as known for the model type, or as the
/// caller states.
bool is_interleaved(Keys& config, const std::string& model_type,
                    const std::optional<bool>& stated) {
  const json converted = config.take(conventions::converted);
  if (!converted.is_null()) {
    config.ignore({"rope_interleave"});  // the pairing before conversion
    return truthy(same("interleaved", {as_json(stated), is_named_interleaved(converted)}));
  }
  const json known = known_pairing(config, model_type, stated);
  const json pairing =
      same("interleaved", {as_json(stated), known, config.take("rope_interleave")});
  TORCH_CHECK_VALUE(!pairing.is_null(), "model_type '", core::brief(model_type),
                    "' is not known: pass interleaved=True (pairs 2i, 2i + 1) or ",
                    "interleaved=False (pairs i, i + rotary_dim / 2), as its code has it");
  return truthy(pairing);
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

/// The specification from a model's keys and the rope_parameters of one kind of layer.
RotarySpec rotation(Keys& config, Keys& rope, const std::string& model_type, const Stated& stated,
                    const std::optional<std::string>& axis) {
  RotarySpec spec(0);
  const double base = base_of(config, rope, model_type, stated.options.base());
  spec.scaling = read_scaling(rope, config);
  set_series(spec, base, widths_of(config, rope, model_type));
  spec.interleaved = is_interleaved(config, model_type, stated.options.interleaved());
  spec.reverse = conventions::reversed.has(model_type);
  const int64_t head_dim = spec.head_dim, rotary_dim = spec.rotary_dim;
  if (conventions::is_axial(model_type)) {
    set_axes_of_tower(spec, config, model_type);
  } else if (conventions::window_of_axis.has(model_type)) {
    set_window_of_axis(spec, axis);
  } else {
    spec.sections = sections_of_text(rope, model_type, rotary_dim / 2);
  }
  if (conventions::trailing.has(model_type)) spec.rotary_start = head_dim - rotary_dim;
  spec.check();
  const auto* learned = row_of(conventions::learned_scales, model_type);
  return learned == nullptr ? spec : with_learned_scale(spec, config, learned->tensor);
}

/// Rejects keys that may concern positions, unless they are known not to.
void check_all_understood(Keys& config, const Stated& stated) {
  config.ignore({"global_head_dim"});
  config.ignore(conventions::no_bearing.list());
  for (const auto& keys : by_layer) config.ignore({keys.first});
  for (const char* key : layer_counts) config.ignore({key});
  if (truthy(config.take("layer_types")) || truthy(config.take("layers_block_type"))) {
    config.ignore(conventions::patterns.list());
  }
  if (config.has("no_rope_layers")) config.ignore({"no_rope_layer_interval"});
  check_understood(config, stated.accounted, stated.options.ignore());
}

/// The specification of one layer; std::nullopt if it does not rotate.
std::optional<RotarySpec> of_layer(const Layer& layer, const Stated& stated,
                                   const std::optional<std::string>& axis = std::nullopt) {
  Keys config(layer.fields, "the configuration");
  const std::string model_type = text_of(get(layer.fields, "model_type"));
  if (!rotates(config, model_type, layer.kind)) return std::nullopt;
  std::optional<Keys> rope = parameters(config, layer.kind);
  if (!rope.has_value()) return std::nullopt;
  RotarySpec spec = rotation(config, *rope, model_type, stated, axis);
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
  const std::string model_type = checked_type(fields);
  const Stated stated{options, accounted};
  Keys config(fields, "the configuration");
  if (conventions::unrotated.has(model_type)) return without_rotation(latent_width(config));
  if (conventions::window_of_axis.has(model_type)) {
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
  const std::string model_type = checked_type(fields);
  const Layers every = every_layer(fields);
  if (conventions::unrotated.has(model_type)) return Specs(every.size());
  return of_layers(every, {options, accounted});
}

std::string checked_type(const Fields& fields) {
  std::string model_type = text_of(get(fields, "model_type"));
  if (const auto* row = row_of(conventions::unsupported, model_type)) {
    TORCH_CHECK_VALUE(false, "model_type '", model_type, "': ", row->reason);
  }
  return model_type;
}

}  // namespace posembed::configuration::huggingface
