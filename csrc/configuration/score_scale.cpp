#include "configuration/score_scale.h"

#include <c10/util/Exception.h>

#include <cmath>

#include "configuration/catalogue.h"
#include "configuration/keys.h"
#include "configuration/layers.h"
#include "configuration/widths.h"

namespace posembed::configuration {
namespace {

/// The block about rotation, of one kind of layers if it names kinds.
const json& rotation_of(const Fields& fields, const std::optional<std::string>& kind) {
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    const json& block = get(fields, key);
    if (!block.is_object()) continue;
    return kind.has_value() && get(block, *kind).is_object() ? get(block, *kind) : block;
  }
  return get(fields, "yarn");
}

/// Collects what keys say.
class Scale {
 public:
  void multiply(double factor, const std::string& key) {
    if (std::abs(factor - 1.0) < 1e-12) return;
    scale_.factor *= factor;
    name(key);
  }

  /// For a width of heads, what replaces 1 / sqrt(width).
  void replace(double scale, int64_t head_dim, const std::string& key) {
    multiply(scale * std::sqrt(static_cast<double>(head_dim)), key);
  }

  void grow(const json& growth, const json& length, const std::string& key) {
    if (!truthy(growth)) return;
    scale_.growth = real(key, growth);
    scale_.length = real("the length of " + key, length);
    name(key);
  }

  void set_logn(const json& length, const std::string& key) {
    scale_.logn = true;
    scale_.length = real("seq_length", length);
    name(key);
  }

  std::optional<ScoreScale> done() const {
    if (scale_.source.empty()) return std::nullopt;
    scale_.check();
    return scale_;
  }

 private:
  void name(const std::string& key) { scale_.source += scale_.source.empty() ? key : ", " + key; }

  ScoreScale scale_;
};

/// DeepSeek's: YaRN's factor of queries and keys, for the components that do not rotate as well.
void add_mscale(Scale& scale, const RotarySpec& spec) {
  const auto* yarn = std::get_if<YarnScaling>(&spec.scaling);
  if (yarn == nullptr || yarn->factor <= 1.0) return;
  const double mscale = 0.1 * yarn->mscale_all_dim.value_or(0.0) * std::log(yarn->factor) + 1.0;
  scale.multiply(mscale * mscale, "mscale_all_dim");
}

/// Llama 4's attention temperature, in layers without rotation.
std::optional<ScoreScale> temperature_of(const Fields& fields) {
  const std::string key = "attn_temperature_tuning";
  const json& otherwise = get(catalogue::of(fields), "temperature");
  if (otherwise.is_null()) return std::nullopt;
  if (fields.contains(key) && !truthy(get(fields, key))) return std::nullopt;
  const auto number = [&](const char* name) {
    return fields.contains(name) ? get(fields, name) : otherwise[name];
  };
  Scale scale;
  scale.grow(number("attn_scale"), number("floor_scale"), key);
  std::optional<ScoreScale> found = scale.done();
  if (found.has_value()) found->offset = 1;
  return found;
}

/// What replaces 1 / sqrt(width) in all layers, or multiplies it.
void add_constant(Scale& scale, const Fields& fields, int64_t head_dim) {
  const json& rules = catalogue::of(fields);
  const std::string code = "the code of " + repr(get(fields, "model_type"));
  if (rules.contains("score_scale")) {
    return scale.replace(real("score_scale", rules["score_scale"]), head_dim, code);
  }
  if (rules.contains("score_factor")) {
    scale.multiply(real("score_factor", rules["score_factor"]), code);
  }
  const char *scalar = "query_pre_attn_scalar", *multiplier = "attention_multiplier";
  if (truthy(get(fields, scalar))) {
    scale.replace(1.0 / std::sqrt(real(scalar, get(fields, scalar))), head_dim, scalar);
  }
  if (truthy(get(fields, multiplier))) {
    scale.replace(real(multiplier, get(fields, multiplier)), head_dim, multiplier);
  }
}

std::optional<ScoreScale> of_metadata(const Fields& fields, const RotarySpec& spec) {
  const std::string model = text_of(get(fields, "general.architecture")) + ".";
  const std::string attention = model + "attention.";
  Scale scale;
  if (truthy(get(fields, attention + "kv_lora_rank"))) add_mscale(scale, spec);
  const std::string key = attention + "scale", temperature = attention + "temperature_scale";
  if (truthy(get(fields, key))) scale.replace(real(key, get(fields, key)), spec.head_dim, key);
  const json *length = &get(fields, attention + "temperature_length"),
             *original = &get(fields, model + "rope.scaling.original_context_length");
  if (!truthy(*length))
    length = truthy(*original) ? original : &get(fields, model + "context_length");
  scale.grow(get(fields, temperature), *length, temperature);
  return scale.done();
}

}  // namespace

std::optional<ScoreScale> score_scale_of(const Fields& fields, const RotarySpec& spec,
                                         const std::optional<std::string>& kind) {
  if (fields.contains("general.architecture")) return of_metadata(fields, spec);
  Scale scale;
  const json& rules = catalogue::of(fields);
  const json &rotation = rotation_of(fields, kind), &scaling = get(fields, "llama_4_scaling");
  const char *original = "original_max_position_embeddings", *beta = "llama_4_scaling_beta";
  if (truthy(get(fields, "qk_rope_head_dim")) && !rules.contains("without_mscale")) {
    add_mscale(scale, spec);
  }
  if (rotation.is_object()) scale.grow(get(rotation, beta), get(rotation, original), beta);
  if (scaling.is_object()) {
    scale.grow(get(scaling, "beta"), get(scaling, original), "llama_4_scaling");
  }
  if (truthy(get(fields, "use_logn_attn"))) {
    scale.set_logn(get(fields, "seq_length"), "use_logn_attn");
  }
  add_constant(scale, fields, spec.head_dim);
  return scale.done();
}

std::optional<ScoreScale> score_scale_without_rotation(const Fields& fields,
                                                       const std::optional<std::string>& kind) {
  if (const auto temperature = temperature_of(fields); temperature.has_value()) return temperature;
  if (kind.has_value() && without_attention.has(*kind)) return std::nullopt;
  const json& rules = catalogue::of(fields);
  Scale scale;
  const bool is_stated = rules.contains("score_scale") || rules.contains("score_factor") ||
                         truthy(get(fields, "query_pre_attn_scalar")) ||
                         truthy(get(fields, "attention_multiplier"));
  if (!is_stated) return std::nullopt;
  Keys config(fields, "the configuration");
  add_constant(scale, fields, head_width(config));
  return scale.done();
}

}  // namespace posembed::configuration
