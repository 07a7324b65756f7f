#include "configuration/scalings.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <map>
#include <type_traits>

#include "configuration/catalogue.h"
#include "rotary/scaling.h"

namespace posembed::configuration {
namespace {

/// Position interpolation.
RotaryScaling linear(Keys& rope, Keys&) {
  return LinearScaling{real("factor", rope.need("factor"))};
}

/// Dynamic NTK; with Hunyuan's alpha, a fixed NTK scaling.
RotaryScaling dynamic(Keys& rope, Keys& config) {
  const json alpha = rope.take("alpha");
  rope.take("factor");
  if (truthy(alpha)) {
    rope.ignore({"beta_fast", "beta_slow", "mscale", "mscale_all_dim"});  // unused with alpha
    return NtkScaling{real("alpha", alpha)};
  }
  const char* length = "max_position_embeddings";
  const double factor = real("factor", rope.need("factor"));
  return DynamicNtkScaling{factor, whole("original_max_positions", config.need(length))};
}

/// The context length of training, in rope_parameters or beside it (Phi-3).
int64_t original_length(Keys& rope, Keys& config) {
  const std::string key = "original_max_position_embeddings";
  const json length = same(key, {config.take(key), rope.take(key)});
  return whole(key, length.is_null() ? rope.need(key) : length);
}

/// How many times longer the context becomes: as given, or the ratio of the two lengths.
double context_factor(Keys& rope, Keys& config) {
  const json factor = rope.take("factor");
  if (!factor.is_null()) return real("factor", factor);
  const char* key = "max_position_embeddings";
  const double length = real(key, config.need(key));
  return length / static_cast<double>(original_length(rope, config));
}

/// The given factor, or 1 if vLLM's apply_yarn_scaling is off.
json yarn_attention_factor(Keys& rope) {
  json factor = rope.take("attention_factor");
  if (truthy(rope.take("apply_yarn_scaling", true))) return factor;
  return same("attention_factor", {factor, 1.0});
}

/// A number that is present and not zero; otherwise `otherwise`.
double real_or(Keys& rope, const std::string& key, double otherwise) {
  const json value = rope.take(key);
  return truthy(value) ? real(key, value) : otherwise;
}

/// YaRN, including DeepSeek's.
RotaryScaling yarn(Keys& rope, Keys& config) {
  const char* length = "max_position_embeddings";  // Ministral-3 repeats it here
  same(length, {rope.take(length), config.take(length)});
  // The first scales queries, not the rotation; the second has no effect in the models' code.
  rope.ignore({"llama_4_scaling_beta", "finetuned"});
  YarnScaling scaling;
  scaling.attention_factor = optional_real("attention_factor", yarn_attention_factor(rope));
  scaling.factor = context_factor(rope, config);
  scaling.original_max_positions = original_length(rope, config);
  scaling.beta_fast = real_or(rope, "beta_fast", 32.0);
  scaling.beta_slow = real_or(rope, "beta_slow", 1.0);
  scaling.mscale = optional_real("mscale", rope.take("mscale"));
  scaling.mscale_all_dim = optional_real("mscale_all_dim", rope.take("mscale_all_dim"));
  scaling.truncate = flag("truncate", rope.take("truncate", true));
  return scaling;
}

/// TeleChat 3, as vLLM reads it: YaRN with an attention factor of its own.
RotaryScaling telechat3(Keys& rope, Keys& config) {
  auto scaling = std::get<YarnScaling>(yarn(rope, config));
  if (!scaling.attention_factor) scaling.attention_factor = 0.07 * std::log(scaling.factor) + 1.0;
  return scaling;
}

/// Llama 3.1.
RotaryScaling llama3(Keys& rope, Keys& config) {
  const auto number = [&](const char* key) { return real(key, rope.need(key)); };
  const double factor = number("factor"), low = number("low_freq_factor");
  return Llama3Scaling{factor, low, number("high_freq_factor"), original_length(rope, config)};
}

/// LongRoPE; Phi-3.5-MoE gives its two attention factors as short_mscale and long_mscale.
RotaryScaling longrope(Keys& rope, Keys& config) {
  LongRopeScaling scaling;
  scaling.short_factor = reals("short_factor", rope.need("short_factor"));
  scaling.long_factor = reals("long_factor", rope.need("long_factor"));
  scaling.original_max_positions = original_length(rope, config);
  scaling.factor = context_factor(rope, config);
  scaling.attention_factor =
      optional_real("attention_factor", rope.same({"attention_factor", "short_mscale"}));
  scaling.long_attention_factor = optional_real("long_attention_factor", rope.take("long_mscale"));
  return scaling;
}

/// Gemma's proportional scaling.
RotaryScaling proportional(Keys& rope, Keys&) {
  const double part = real("proportion", rope.take("partial_rotary_factor", 1.0));
  return ProportionalScaling{part, real("factor", rope.take("factor", 1.0))};
}

/// No scaling.
RotaryScaling unscaled(Keys&, Keys&) { return {}; }

using ScalingReader = RotaryScaling (*)(Keys& rope, Keys& config);

const std::map<std::string, ScalingReader> scaling_readers = {{"default", unscaled},
                                                              {"axial", unscaled},
                                                              {"linear", linear},
                                                              {"dynamic", dynamic},
                                                              {"yarn", yarn},
                                                              {"llama3", llama3},
                                                              {"longrope", longrope},
                                                              {"proportional", proportional},
                                                              {"telechat3-yarn", telechat3}};

/// Other names of a type, and its usual name.
const std::map<json, const char*> usual_names = {
    {"mrope", "default"}, {"su", "longrope"}, {"xdrope", "dynamic"}};

json usual_name(const json& name) {
  const auto found = usual_names.find(name);
  return found == usual_names.end() ? name : json(found->second);
}

}  // namespace

std::string rope_type(Keys& rope) {
  const json now = usual_name(rope.take("rope_type")), before = usual_name(rope.take("type"));
  const json given = same("rope_type", {now, before});
  const std::string name = truthy(given) ? text_of(given) : "default";
  if (scaling_readers.count(name) > 0) return name;
  std::vector<std::string> known;
  for (const auto& each : scaling_readers) known.push_back(each.first);
  TORCH_CHECK_VALUE(false, "rope_type: expected one of ", repr(known), ", got ", repr(given));
}

RotaryScaling read_scaling(Keys& rope, Keys& config) {
  RotaryScaling scaling = scaling_readers.at(rope_type(rope))(rope, config);
  if (!catalogue::of(config.fields()).contains("doubled_ntk")) return scaling;
  config.ignore({"seq_length"});
  if (!truthy(config.take("use_dynamic_ntk"))) return scaling;
  // Qwen's code rounds the length up to seq_length * 2^k: at these lengths, the series is that of a
  // factor of 2.
  return DynamicNtkScaling{2.0, whole("original_max_positions", config.need("seq_length"))};
}

RotarySpec divided(const RotarySpec& spec, const std::vector<double>& divisors, int64_t length) {
  RotarySpec plain = spec;
  plain.scaling = {};
  std::vector<double> factors = frequencies_of(plain);
  const std::vector<double> scaled = frequencies_of(spec);
  TORCH_CHECK_VALUE(divisors.size() == factors.size(),
                    "divisors: expected rotary_dim / 2 = ", factors.size(), " numbers, got ",
                    divisors.size());
  for (size_t pair = 0; pair < factors.size(); ++pair) {
    factors[pair] = factors[pair] / scaled[pair] * divisors[pair];
  }
  LongRopeScaling scaling;
  scaling.short_factor = scaling.long_factor = factors;
  scaling.original_max_positions = length;
  scaling.attention_factor = rotary::scaled(spec).attention_factor;
  plain.scaling = scaling;
  return plain;
}

double attention_factor_of(const RotaryScaling& scaling) {
  RotarySpec spec(8);  // the factor is the same for every width
  spec.scaling = scaling;
  spec.check();
  return rotary::scaled(spec).attention_factor;
}

std::optional<int64_t> original_length_of(const RotaryScaling& scaling) {
  return std::visit(
      [](const auto& given) -> std::optional<int64_t> {
        using Given = std::decay_t<decltype(given)>;
        if constexpr (std::is_same_v<Given, DynamicNtkScaling> ||
                      std::is_same_v<Given, YarnScaling> || std::is_same_v<Given, Llama3Scaling> ||
                      std::is_same_v<Given, LongRopeScaling>) {
          return given.original_max_positions;
        }
        return std::nullopt;
      },
      scaling);
}

std::vector<double> frequencies_of(const RotarySpec& spec) {
  spec.check();
  std::vector<double> frequencies;
  for (const core::DoubleDouble& each : rotary::scaled(spec).frequencies) {
    frequencies.push_back(each.high);
  }
  return frequencies;
}

}  // namespace posembed::configuration
