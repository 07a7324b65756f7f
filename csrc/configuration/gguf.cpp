#include "configuration/gguf.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "configuration/axes.h"
#include "configuration/gguf_architectures.h"
#include "configuration/gguf_layers.h"
#include "configuration/keys.h"
#include "configuration/layers.h"
#include "configuration/scalings.h"

namespace posembed::configuration::gguf {
namespace {

// ------------------------------------------------------------------------------ numbers of a layer

struct HeadWidths {
  int64_t head_dim;
  int64_t rotary_dim;
};

/// The width of layers with a sliding window. Architectures without such widths may only repeat
/// that of the others.
json own_width(Keys& keys, const std::string& key, bool known, bool slides, const json& others) {
  const json own = keys.take(key);
  TORCH_CHECK_VALUE(known || own.is_null() || equal(own, others), key,
                    ": not understood for this architecture, whose layers are alike: expected ",
                    repr(others), ", got ", repr(own));
  return slides && !own.is_null() ? own : others;
}

/// The width of a head: as given, or a part of the model's.
json head_dim_of(Metadata& file) {
  const json given = file.model.take("attention.key_length");
  if (truthy(given)) return given;
  const char *width = "embedding_length", *heads = "attention.head_count";
  json number = file.model.need(heads);
  if (number.is_array() && !number.empty()) number = json(number.front());
  const int64_t total = whole(width, file.model.need(width)), count = whole(heads, number);
  TORCH_CHECK_VALUE(count > 0, heads, ": expected a positive number, got ", count);
  return total / count;
}

HeadWidths widths_of(Metadata& file, bool slides) {
  const char *count = "dimension_count", *key = "attention.key_length";
  const json& rule = get(file.rules, "sliding");
  const json stated = file.rope.take(count);
  const bool own = truthy(get(rule, "rotary_dim"));
  if (truthy(get(file.rules, "latent"))) {  // the rotated components are a separate head
    own_width(file.rope, "dimension_count_swa", own, slides, stated);
    const int64_t rotary_dim = whole(count, file.rope.need(count));
    return {rotary_dim, rotary_dim};
  }
  const json all = head_dim_of(file), rotated = truthy(stated) ? stated : all;
  const bool own_head = truthy(get(rule, "head_dim"));
  HeadWidths widths;
  widths.head_dim =
      whole(key, own_width(file.model, "attention.key_length_swa", own_head, slides, all));
  widths.rotary_dim =
      whole(count, own_width(file.rope, "dimension_count_swa", own, slides, rotated));
  if (!slides && truthy(get(file.rules, "half_rotary_dim"))) widths.rotary_dim /= 2;
  TORCH_CHECK_VALUE(!truthy(get(file.rules, "whole_head")) || widths.rotary_dim == widths.head_dim,
                    count, ": expected the whole head, ", widths.head_dim, ", got ",
                    widths.rotary_dim);
  return widths;
}

/// freq_base, or the caller's in its place; or that of llama.cpp's program, which reads none.
json shared_base(Metadata& file, const std::optional<double>& stated) {
  const json given = stated.has_value() ? json(*stated) : json();
  const json& program = get(file.rules, "program_base");
  const json base = same("rope.freq_base", {file.rope.take("freq_base"), given, program});
  return base.is_null() ? file.rope.need("freq_base") : base;
}

/// The base of layers with a sliding window: their own in the file or in llama.cpp's program, or
/// that of all layers.
double base_of(Metadata& file, const std::optional<double>& stated, bool slides) {
  const char* key = "freq_base_swa";
  const json& rule = get(get(file.rules, "sliding"), "base");
  const json own = file.rope.take(key);
  TORCH_CHECK_VALUE(!rule.is_null() || own.is_null(), key, ": not understood for '",
                    file.architecture, "', whose layers are alike");
  if (!slides && rule != "shared") return base_number("freq_base", shared_base(file, stated));
  if (rule == "shared") {
    const json base = shared_base(file, stated);
    TORCH_CHECK_VALUE(own.is_null() || equal(own, base), key, ": expected ", repr(base),
                      ", the base that llama.cpp has for all layers of '", file.architecture,
                      "', got ", repr(own));
    return base_number("freq_base", base);
  }
  if (!own.is_null()) return base_number(key, own);
  if (rule == "stated") return base_number(key, file.rope.need(key));
  return base_number(key, rule.is_number() ? rule : shared_base(file, stated));
}

/// The sizes of the sections if positions have axes: four numbers, of which models use three. A
/// single axis is none.
std::vector<int64_t> section_sizes(Metadata& file) {
  const char* key = "dimension_sections";
  const bool known = file.rules.contains("sections");
  const bool optional = !known || truthy(get(file.rules, "sections_optional"));
  const json given = optional ? file.rope.take(key, json::array()) : file.rope.need(key);
  std::vector<int64_t> sizes = wholes(key, given);
  while (!sizes.empty() && sizes.back() == 0) sizes.pop_back();
  if (sizes.size() == 1 && known) return {};
  TORCH_CHECK_VALUE(known || sizes.empty(), key, ": '", file.architecture,
                    "' is not known to have sections");
  return sizes;
}

/// Whether pairs are interleaved; with sections, llama.cpp always pairs halves.
bool pairing_of(const json& rules, bool has_sections, const std::optional<bool>& stated) {
  const bool known = get(rules, "pairing") == "interleaved" && !has_sections;
  const json given = stated.has_value() ? json(*stated) : json();
  return truthy(same("interleaved", {given, known}));
}

/// The sections, contiguous or alternating.
std::optional<Sections> sections_with(const std::vector<int64_t>& sizes, const json& rules,
                                      int64_t pairs) {
  if (sizes.empty()) return std::nullopt;
  if (get(rules, "sections") == "alternating") return in_turns(sizes, pairs);
  return Sections::of(sizes);
}

// -----------------------------------------------------------------------------------------
// scalings

/// The context length of training.
int64_t context_length(Metadata& file) {
  const json length = file.rope.take("scaling.original_context_length");
  const char* key = "context_length";
  return whole(key, length.is_null() ? file.model.need(key) : length);
}

/// What llama.cpp's program makes of the multiplier of mscale_all_dim, which three converters
/// write.
void set_mscale(YarnScaling& scaling, Metadata& file) {
  const char* key = "scaling.yarn_log_multiplier";
  const json& rule = get(file.rules, "log_multiplier");
  const json given = file.rope.take(key);
  if (given.is_null()) return;
  TORCH_CHECK_VALUE(!rule.is_null(), key, ": not understood for '", file.architecture, "'");
  const double all_dim = real(key, given) * get(rule, "times").get<double>();
  if (all_dim == 0.0) return;
  scaling.mscale_all_dim = all_dim;
  scaling.mscale = get(rule, "mscale") == "equal" ? all_dim : 1.0;
}

/// llama.cpp computes the factor itself, whatever these keys say.
void check_factors_of_yarn(Metadata& file, const YarnScaling& scaling) {
  const char *blend = "scaling.yarn_ext_factor", *factor = "scaling.yarn_attn_factor";
  TORCH_CHECK_VALUE(equal(file.rope.take(blend, 1.0), 1.0), blend,
                    ": expected 1: a partial blend has no scaling here");
  const double computed = attention_factor_of(scaling);
  const double expected =
      get(file.rules, "attention_factor_of_yarn") == "relative" ? 1.0 : computed;
  const double given = real(factor, file.rope.take(factor, expected));
  TORCH_CHECK_VALUE(std::abs(given - expected) <= 1e-5, factor, ": expected ", expected,
                    ", from which llama.cpp rotates whatever this key says, got ", given);
}

/// YaRN. The file's attention factor multiplies the paper's, or that of mscale_all_dim.
YarnScaling yarn(Metadata& file, const json& factor, double attention_factor) {
  const auto number = [&](const char* key, double otherwise) {
    return real(key, file.rope.take(key, otherwise));
  };
  const json& beta_fast = get(file.rules, "beta_fast");
  YarnScaling scaling;
  scaling.factor =
      real("scaling.factor", factor.is_null() ? file.rope.need("scaling.factor") : factor);
  set_mscale(scaling, file);
  scaling.original_max_positions = context_length(file);
  scaling.beta_fast =
      number("scaling.yarn_beta_fast", beta_fast.is_null() ? 32.0 : beta_fast.get<double>());
  scaling.beta_slow = number("scaling.yarn_beta_slow", 1.0);
  check_factors_of_yarn(file, scaling);
  if (attention_factor == 1.0) return scaling;
  scaling.attention_factor = attention_factor * attention_factor_of(scaling);
  return scaling;
}

/// A tensor of divisors. Where layers differ in width, it fits the widest.
std::vector<double> divisors_of(Metadata& file, const std::string& name, int64_t rotary_dim) {
  std::vector<double> divisors = reals(name, file.tensors.need(name));
  const auto pairs = static_cast<size_t>(std::max<int64_t>(rotary_dim / 2, 0));
  const bool wider = get(file.rules, "tensors_of") == full && divisors.size() > pairs;
  if (wider) divisors.resize(pairs);
  return divisors;
}

/// LongRoPE, whose factors are tensors of the file.
LongRopeScaling longrope(Metadata& file, const json& factor, double attention_factor,
                         int64_t rotary_dim) {
  TORCH_CHECK_VALUE(
      get(file.rules, "tensors") == "both" || get(file.rules, "tensors") == "rope_factors",
      "scaling.type: 'longrope' is not understood for '", file.architecture,
      "', for which llama.cpp reads no factors");
  TORCH_CHECK_VALUE(factor.is_null() || equal(factor, 1.0),
                    "scaling.factor: expected none beside scaling.type 'longrope', got ",
                    repr(factor));
  LongRopeScaling scaling;
  scaling.short_factor = divisors_of(file, "rope_factors_short.weight", rotary_dim);
  scaling.long_factor = divisors_of(file, "rope_factors_long.weight", rotary_dim);
  scaling.original_max_positions = context_length(file);
  scaling.attention_factor = attention_factor;
  return scaling;
}

/// Hunyuan's NTK-aware base, if the file gives its factor.
std::optional<NtkScaling> alpha_of(Metadata& file, const json& type, const json& factor) {
  if (!truthy(get(file.rules, "alpha"))) return std::nullopt;
  const char* key = "scaling.alpha";
  const double alpha = real(key, file.rope.take(key, 0.0));
  if (alpha <= 0.0) return std::nullopt;
  const bool alone = type == "none" || factor.is_null() || equal(factor, 1.0);
  TORCH_CHECK_VALUE(alone && type != "yarn", key, ": expected no other scaling beside it, got ",
                    repr(type));
  return NtkScaling{alpha};
}

/// The scaling, by its type.
RotaryScaling scaling_of(Metadata& file, int64_t rotary_dim) {
  file.rope.ignore({"scaling.finetuned"});
  const json type = file.rope.take("scaling.type", "linear");
  const json factor = file.rope.same({"scaling.factor", "scale_linear"});
  const char* key = "scaling.attn_factor";
  const double attention_factor = real(key, file.rope.take(key, 1.0));
  const bool old = get(file.rules, "tensors") == "rope_factors" && factor.is_null() &&
                   file.tensors.has("rope_factors_short.weight");  // files without a type
  if (type == "longrope" || (type == "linear" && old)) {
    return longrope(file, factor, attention_factor, rotary_dim);
  }
  if (const auto ntk = alpha_of(file, type, factor)) return *ntk;
  if (type == "yarn") return yarn(file, factor, attention_factor);
  TORCH_CHECK_VALUE(type == "none" || type == "linear",
                    "scaling.type: expected 'none', 'linear', 'longrope' or 'yarn', got ",
                    repr(type));
  TORCH_CHECK_VALUE(attention_factor == 1.0, key, ": expected none beside scaling.type ",
                    repr(type));
  if (type == "none" || factor.is_null()) return {};
  return LinearScaling{real("scaling.factor", factor)};
}

/// Whether a tensor of the file changes this kind of layers.
bool has_tensors(const json& rules, bool slides) {
  return !slides || get(rules, "tensors_of") != full;
}

/// Frequencies divided by a tensor of the file, if it has one: Llama 3's, Gemma 4's.
RotarySpec with_tensor(const RotarySpec& spec, Metadata& file, bool slides) {
  const json& known = get(file.rules, "tensors");
  const bool read = known == "rope_freqs" || known == "both";
  if (!read || std::holds_alternative<LongRopeScaling>(spec.scaling)) return spec;
  const char* name = "rope_freqs.weight";
  const bool given = !file.tensors.take(name).is_null();
  if (!has_tensors(file.rules, slides)) return spec;
  if (!given && !truthy(get(file.rules, "tensors_required"))) return spec;
  TORCH_CHECK_VALUE(!spec.sections.has_value(), name, ": expected none beside dimension_sections");
  const std::vector<double> divisors = divisors_of(file, name, spec.rotary_dim);
  const char* key = "context_length";
  return divided(spec, divisors, whole(key, file.model.need(key)));
}

/// Rejects scalings that llama.cpp applies to layers with a sliding window in part.
void check_part_of_scaling(Metadata& file) {
  const json& rule = get(file.rules, "sliding");
  const json factor = file.rope.take("scaling.attn_factor", 1.0);
  TORCH_CHECK_VALUE(!truthy(get(rule, "attention_factor")) || equal(factor, 1.0),
                    "scaling.attn_factor: expected 1 where some layers are not scaled, got ",
                    repr(factor));
  const json type = file.rope.take("scaling.type"), length = file.rope.take("scaling.factor");
  const bool scaled = truthy(get(rule, "scaled")) && get(rule, "base") != "shared";
  TORCH_CHECK_VALUE(!scaled || type != "none" || length.is_null() || equal(length, 1.0),
                    "scaling.factor: expected none beside scaling.type 'none', got ", repr(length));
}

/// llama.cpp's program rotates these without any scaling.
void check_program(const Metadata& file, const RotarySpec& spec) {
  TORCH_CHECK_VALUE(
      !file.rules.contains("program_base") || std::holds_alternative<std::monostate>(spec.scaling),
      "scaling.type: '", file.architecture, "' is not scaled in llama.cpp");
}

/// The specification of layers with or without a sliding window.
RotarySpec specification_of(const Fields& fields, bool slides,
                            const ConfigurationOptions& options) {
  Metadata file = metadata_of(fields, options);
  const std::vector<int64_t> sizes = section_sizes(file);
  RotarySpec spec(0);
  spec.interleaved = pairing_of(file.rules, !sizes.empty(), options.interleaved());
  const HeadWidths widths = widths_of(file, slides);
  spec.head_dim = widths.head_dim;
  spec.rotary_dim = widths.rotary_dim;
  spec.base = base_of(file, options.base(), slides);
  file.rope.ignore({"freq_base"});
  spec.sections = sections_with(sizes, file.rules, spec.rotary_dim / 2);
  RotarySpec scaled = spec;
  scaled.scaling = scaling_of(file, spec.rotary_dim);
  check_program(file, scaled);
  scaled = with_tensor(scaled, file, slides);
  scaled.check();
  if (slides) check_part_of_scaling(file);
  file.rope.done();
  file.tensors.done();
  const bool plain = slides && !truthy(get(get(file.rules, "sliding"), "scaled"));
  return plain ? spec : scaled;
}

/// Whether layers with or without a sliding window rotate.
bool rotates(const std::vector<Layer>& layers, bool slides) {
  return std::any_of(layers.begin(), layers.end(),
                     [&](const Layer& layer) { return layer.slides == slides && layer.rotates; });
}

/// For a model whose keys say that it does not rotate.
RotarySpec unrotated(Metadata& file) {
  RotarySpec spec(whole("attention.key_length", head_dim_of(file)));
  spec.rotary_dim = 0;
  return spec;
}

}  // namespace

bool is_metadata(const Fields& fields) { return fields.contains("general.architecture"); }

RotarySpec read(const Fields& fields, const ConfigurationOptions& options) {
  Metadata file = metadata_of(fields, options);
  const std::vector<Layer> layers = layers_of(file);
  std::vector<std::string> kinds;
  if (has_windows(file)) kinds = {full, sliding};
  const std::optional<std::string>& asked = options.layer_type();
  if (asked.has_value()) {
    check_type(kinds, *asked);
    TORCH_CHECK_VALUE(rotates(layers, asked == sliding), "layer_type: layers of kind '", *asked,
                      "' do not rotate");
    return specification_of(fields, asked == sliding, options);
  }
  const bool with = rotates(layers, true), without = rotates(layers, false);
  if (!with && !without) return unrotated(file);
  const RotarySpec spec = specification_of(fields, !without, options);
  TORCH_CHECK_VALUE(!with || !without || spec == specification_of(fields, true, options),
                    "layer_type: expected one of ", repr(kinds), ", got None");
  return spec;
}

std::vector<std::optional<RotarySpec>> read_layers(const Fields& fields,
                                                   const ConfigurationOptions& options) {
  Metadata file = metadata_of(fields, options);
  file.model.need("block_count");
  std::optional<RotarySpec> of_kind[2];
  std::vector<std::optional<RotarySpec>> specs;
  for (const Layer& layer : layers_of(file)) {
    std::optional<RotarySpec>& spec = of_kind[layer.slides ? 1 : 0];
    if (layer.rotates && !spec.has_value()) {
      spec = specification_of(fields, layer.slides, options);
    }
    specs.push_back(layer.rotates ? spec : std::nullopt);
  }
  return specs;
}

}  // namespace posembed::configuration::gguf
