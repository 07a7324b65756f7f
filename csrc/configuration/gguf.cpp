#include "configuration/gguf.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "configuration/axes.h"
#include "configuration/keys.h"
#include "configuration/layers.h"
#include "configuration/scalings.h"
#include "configuration/words.h"

namespace posembed::configuration::gguf {
namespace {

// Pairs (2i, 2i + 1): converters permute weights for them if the model pairs halves.
constexpr Words interleaved = R"(
arcee arctic baichuan bailingmoe chameleon chatglm cohere2 cohere2moe command-r deci deepseek
deepseek2 deepseek32 ernie4_5 ernie4_5-moe glm-dsa glm4 granite granitehybrid granitemoe internlm2
llada llama llama-embed llama4 maincoder minicpm mistral3 mistral4 neo-bert olmo plm smollm3
starcoder xverse
)";
// Pairs (i, i + dimension_count / 2).
constexpr Words half_split = R"(
afmoe apertus bailingmoe2 bert bitnet codeshell cogvlm dbrx dots1 dream eurobert exaone exaone-moe
exaone4 falcon falcon-h1 gemma gemma-embedding gemma2 gemma3 gemma3n glm4moe gpt-oss gptneox grok
grovemoe hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 jais2 jina-bert-v3 laguna lfm2 lfm2moe llada-moe
mellum mimo2 minicpm3 minimax-m2 modern-bert nemotron nomic-bert nomic-bert-moe olmo2 olmoe openelm
orion paddleocr pangu-embedded phi2 phi3 phimoe plamo plamo2 plamo3 qwen qwen2 qwen2moe qwen2vl
qwen3 qwen35 qwen35moe qwen3moe qwen3next qwen3vl qwen3vlmoe rnd1 seed_oss smallthinker stablelm
starcoder2 step35 talkie
)";
// Position axes, if the metadata has sections: contiguous or alternating.
constexpr Words contiguous_sections = "glm4 glm4moe hunyuan_vl paddleocr qwen2vl";
constexpr Words interleaved_sections = "qwen35 qwen35moe qwen3vl qwen3vlmoe";
// Latent attention: the rotated components are a separate head.
constexpr Words apart = "deepseek2 deepseek32 glm-dsa minicpm3 mistral4 plm";
// The base of sliding-window layers, which older files lack; those layers are not scaled.
constexpr Words with_sliding_base = "gemma3 gemma3n";
constexpr double sliding_base = 10000.0;
// Architectures that scale frequencies only in full-attention layers: OLMo 3 is an olmo2.
constexpr Words scaled_if_full = "gemma3 gemma3n olmo2";
// Architectures whose full-attention layers do not rotate if other layers have sliding windows.
constexpr Words rotated_if_sliding = "cohere2 cohere2moe exaone-moe exaone4";
// Architectures in which every fourth layer does not rotate, which no key says.
constexpr Words every_fourth_unrotated = "afmoe llama4 smallthinker smollm3";
// The file's multiplier is a tenth of mscale_all_dim, which equals mscale.
constexpr Words tenth_of_mscale = "deepseek2 deepseek32";

/// The default period: one of every `layers` layers has full attention.
struct Period {
  Words names;
  int64_t layers;
};
constexpr Period periods[] = {
    {"afmoe cohere2 exaone-moe exaone4 olmo2", 4},
    {"gemma2 gpt-oss", 2},
    {"gemma3", 6},
    {"gemma3n", 5},
};

const char* const full = "full_attention";
const char* const sliding = "sliding_attention";

/// A file's keys: the model's, those about rotation, and the tensors that belong to the rotation.
struct Metadata {
  std::string architecture;
  Keys model, rope, tensors;
};

bool starts(const std::string& key, const std::string& start) {
  return key.compare(0, start.size(), start) == 0;
}

/// The keys that start with `start`; the prefix is removed unless `keep`.
Fields starting(const Fields& fields, const std::string& start, bool keep = false) {
  Fields found = Fields::object();
  for (const auto& each : fields.items()) {
    if (!starts(each.key(), start)) continue;
    found[keep ? each.key() : each.key().substr(start.size())] = each.value();
  }
  return found;
}

Metadata metadata_of(Fields fields, const ConfigurationOptions& options) {
  const std::string architecture = text_of(get(fields, "general.architecture"));
  for (const std::string& key : options.ignore()) fields.erase(key);
  const std::string start = architecture + ".";
  const Fields own = starting(fields, start);
  return {architecture, Keys(own, "the metadata"), Keys(starting(own, "rope."), start + "rope"),
          Keys(starting(fields, "rope_", true), "tensors")};
}

// -------------------------------------------------------------------------------------------
// layers

/// The kinds of layers if some have a sliding window; empty if all layers are alike.
std::vector<std::string> kinds_of(Metadata& file) {
  const bool window = truthy(file.model.take("attention.sliding_window"));
  const bool own_base = !file.rope.take("freq_base_swa").is_null();
  if (!window && !own_base && !with_sliding_base.has(file.architecture)) return {};
  return {full, sliding};
}

/// Whether layers with and without a sliding window rotate differently.
bool differ(Metadata& file) {
  const json own = file.rope.take("freq_base_swa"), base = file.rope.take("freq_base");
  if (!own.is_null() && !equal(own, base)) return true;
  if (with_sliding_base.has(file.architecture)) return true;
  const json type = file.rope.take("scaling.type", "none");
  const bool scaled = type != "none" || !file.rope.take("scaling.factor").is_null();
  return scaled && scaled_if_full.has(file.architecture);
}

/// The pattern of sliding windows: a list, or the length of a period.
json pattern_of(Metadata& file) {
  const Period* row = row_of(periods, file.architecture);
  const json otherwise = row == nullptr ? json() : json(row->layers);
  const char* key = "attention.sliding_window_pattern";
  json pattern = file.model.take(key, otherwise);
  TORCH_CHECK_VALUE(truthy(pattern) || pattern.is_number(), key, ": missing in the metadata");
  return pattern;
}

/// Whether each layer has a sliding window: listed, or all but the last of a period.
std::vector<bool> sliding_layers(Metadata& file, size_t length) {
  const json pattern = pattern_of(file);
  std::vector<bool> windows;
  if (pattern.is_array()) {
    for (size_t place = 0; place < length; ++place) {
      windows.push_back(truthy(pattern[place % pattern.size()]));
    }
    return windows;
  }
  const int64_t period = whole("attention.sliding_window_pattern", pattern);
  TORCH_CHECK_VALUE(period >= 0, "attention.sliding_window_pattern: expected 0 or more, got ",
                    period);
  for (int64_t place = 0; place < static_cast<int64_t>(length); ++place) {
    windows.push_back(period == 0 || place % period < period - 1);
  }
  return windows;
}

/// Whether a layer rotates, among layers with and without a sliding window.
bool is_rotated(Metadata& file, const std::vector<bool>& windows, size_t place) {
  // A Llama 4 whose window is given as 0 rotates everywhere.
  if (every_fourth_unrotated.has(file.architecture) &&
      !equal(file.model.take("attention.sliding_window"), 0)) {
    return place % 4 != 3;
  }
  if (!rotated_if_sliding.has(file.architecture)) return true;
  const bool any = std::find(windows.begin(), windows.end(), true) != windows.end();
  return !any || windows[place];
}

// ------------------------------------------------------------------------------ numbers of a layer

struct HeadWidths {
  int64_t head_dim;
  int64_t rotary_dim;
};

HeadWidths head_widths_of(Metadata& file, bool local) {
  const char* count = "dimension_count";
  if (apart.has(file.architecture)) {
    const int64_t rotary_dim = whole(count, file.rope.need(count));
    return {rotary_dim, rotary_dim};
  }
  std::vector<std::string> lengths = {"attention.key_length"}, counts = {count};
  if (local) {
    lengths.insert(lengths.begin(), "attention.key_length_swa");
    counts.insert(counts.begin(), "dimension_count_swa");
  }
  file.rope.ignore({"dimension_count_swa"});
  json head_dim = file.model.first(lengths);
  const json rotary_dim = file.rope.first(counts);
  if (head_dim.is_null()) {
    const char *width = "embedding_length", *heads = "attention.head_count";
    const int64_t total = whole(width, file.model.need(width));
    const int64_t number = whole(heads, file.model.need(heads));
    TORCH_CHECK_VALUE(number > 0, heads, ": expected a positive number, got ", number);
    head_dim = total / number;
  }
  return {whole("attention.key_length", head_dim),
          whole(count, rotary_dim.is_null() ? head_dim : rotary_dim)};
}

/// freq_base; for sliding-window layers, their own.
double base_of(Metadata& file, const std::optional<double>& stated, bool local) {
  json theta = file.rope.take("freq_base");
  if (local) {
    const json known = with_sliding_base.has(file.architecture) ? json(sliding_base) : json();
    theta = file.rope.take("freq_base_swa", known);
  }
  const json given = stated.has_value() ? json(*stated) : json();
  theta = same("rope.freq_base", {theta, given});
  return real("freq_base", theta.is_null() ? file.rope.need("freq_base") : theta);
}

/// The sizes of the sections if positions have axes: four numbers, of which models use three.
std::vector<int64_t> section_sizes(Metadata& file) {
  const char* key = "dimension_sections";
  std::vector<int64_t> sizes = wholes(key, file.rope.take(key, json::array()));
  while (!sizes.empty() && sizes.back() == 0) sizes.pop_back();
  return sizes;
}

/// Whether pairs are interleaved; with sections, llama.cpp always pairs halves.
bool pairing_of(const std::string& architecture, bool has_sections,
                const std::optional<bool>& stated) {
  json known;
  if (half_split.has(architecture)) known = false;
  if (interleaved.has(architecture)) known = !has_sections;
  const json given = stated.has_value() ? json(*stated) : json();
  const json pairing = same("interleaved", {given, known});
  TORCH_CHECK_VALUE(!pairing.is_null(), "general.architecture '", architecture,
                    "' is not known: pass interleaved=");
  return truthy(pairing);
}

/// The sections, contiguous or alternating.
std::optional<Sections> sections_with(const std::vector<int64_t>& sizes,
                                      const std::string& architecture, int64_t pairs) {
  if (sizes.empty()) return std::nullopt;
  if (interleaved_sections.has(architecture)) return in_turns(sizes, pairs);
  TORCH_CHECK_VALUE(contiguous_sections.has(architecture), "dimension_sections: '", architecture,
                    "' is not known to have sections");
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

/// Rejects values other than 1.
void check_one(Metadata& file, const char* key, const char* why) {
  TORCH_CHECK_VALUE(equal(file.rope.take(key, 1.0), 1.0), key, ": expected 1", why);
}

/// The file's attention factor multiplies the paper's, or that of mscale_all_dim.
YarnScaling yarn(Metadata& file, const json& factor, double attention_factor) {
  check_one(file, "scaling.yarn_ext_factor", ": a partial blend has no scaling here");
  check_one(file, "scaling.yarn_attn_factor", ", beside scaling.attn_factor");
  const auto number = [&](const char* key, double otherwise) {
    return real(key, file.rope.take(key, otherwise));
  };
  YarnScaling scaling;
  scaling.factor =
      real("scaling.factor", factor.is_null() ? file.rope.need("scaling.factor") : factor);
  const json all_dim = file.rope.take("scaling.yarn_log_multiplier");
  if (!all_dim.is_null()) {
    scaling.mscale_all_dim = real("scaling.yarn_log_multiplier", all_dim);
    const bool both = tenth_of_mscale.has(file.architecture);
    scaling.mscale = both ? *scaling.mscale_all_dim : 1.0;
  }
  scaling.original_max_positions = context_length(file);
  scaling.beta_fast = number("scaling.yarn_beta_fast", 32.0);
  scaling.beta_slow = number("scaling.yarn_beta_slow", 1.0);
  if (attention_factor == 1.0) return scaling;
  scaling.attention_factor = attention_factor * attention_factor_of(scaling);
  return scaling;
}

/// LongRoPE, whose factors are tensors of the file.
LongRopeScaling longrope(Metadata& file, double attention_factor) {
  LongRopeScaling scaling;
  const auto factors = [&](const char* key) { return reals(key, file.tensors.need(key)); };
  scaling.short_factor = factors("rope_factors_short.weight");
  scaling.long_factor = factors("rope_factors_long.weight");
  scaling.original_max_positions = context_length(file);
  scaling.attention_factor = attention_factor;
  return scaling;
}

/// The scaling, by its type.
RotaryScaling scaling_of(Metadata& file) {
  file.rope.ignore({"scaling.finetuned"});
  const json type = file.rope.take("scaling.type", "linear");
  const json factor = file.rope.same({"scaling.factor", "scale_linear"});
  const char* key = "scaling.attn_factor";
  const double attention_factor = real(key, file.rope.take(key, 1.0));
  if (type == "longrope") return longrope(file, attention_factor);
  if (type == "yarn") return yarn(file, factor, attention_factor);
  TORCH_CHECK_VALUE(type == "none" || type == "linear",
                    "scaling.type: expected 'none', 'linear', 'longrope' or 'yarn', got ",
                    repr(type));
  TORCH_CHECK_VALUE(attention_factor == 1.0, key, ": expected none beside scaling.type ",
                    repr(type));
  if (type == "none" || factor.is_null()) return {};
  return LinearScaling{real("scaling.factor", factor)};
}

/// Frequencies divided by a tensor of the file, if it has one: Llama 3's.
RotarySpec with_tensor(const RotarySpec& spec, Metadata& file) {
  if (std::holds_alternative<LongRopeScaling>(spec.scaling)) return spec;
  const char* name = "rope_freqs.weight";
  const json factors = file.tensors.take(name);
  if (factors.is_null()) return spec;
  const char* key = "context_length";
  return divided(spec, reals(name, factors), whole(key, file.model.need(key)));
}

/// The specification of layers with or without a sliding window.
RotarySpec specification_of(const Fields& fields, bool local, const ConfigurationOptions& options) {
  Metadata file = metadata_of(fields, options);
  const std::vector<int64_t> sizes = section_sizes(file);
  RotarySpec spec(0);
  spec.interleaved = pairing_of(file.architecture, !sizes.empty(), options.interleaved());
  const HeadWidths widths = head_widths_of(file, local);
  spec.head_dim = widths.head_dim;
  spec.rotary_dim = widths.rotary_dim;
  spec.base = base_of(file, options.base(), local);
  spec.sections = sections_with(sizes, file.architecture, spec.rotary_dim / 2);
  RotarySpec whole_spec = spec;
  whole_spec.scaling = scaling_of(file);
  whole_spec = with_tensor(whole_spec, file);
  whole_spec.check();
  file.rope.ignore({"freq_base_swa"});
  file.rope.done();
  file.tensors.done();
  return local && scaled_if_full.has(file.architecture) ? spec : whole_spec;
}

}  // namespace

bool is_metadata(const Fields& fields) { return fields.contains("general.architecture"); }

RotarySpec read(const Fields& fields, const ConfigurationOptions& options) {
  Metadata file = metadata_of(fields, options);
  const std::vector<std::string> kinds = kinds_of(file);
  const std::optional<std::string>& asked = options.layer_type();
  if (asked.has_value()) check_type(kinds, *asked);
  TORCH_CHECK_VALUE(asked.has_value() || kinds.empty() || !differ(file),
                    "layer_type: expected one of ", repr(kinds), ", got None");
  TORCH_CHECK_VALUE(asked != full || !rotated_if_sliding.has(file.architecture),
                    "layer_type: layers of kind '", full, "' do not rotate");
  return specification_of(fields, asked == sliding, options);
}

std::vector<std::optional<RotarySpec>> read_layers(const Fields& fields,
                                                   const ConfigurationOptions& options) {
  Metadata file = metadata_of(fields, options);
  const int64_t count = whole("block_count", file.model.need("block_count"));
  TORCH_CHECK_VALUE(count >= 0, "block_count: expected 0 or more, got ", count);
  const auto length = static_cast<size_t>(count);
  std::vector<bool> windows(length, false);
  if (!kinds_of(file).empty()) windows = sliding_layers(file, length);
  std::optional<RotarySpec> of_kind[2];
  std::vector<std::optional<RotarySpec>> specs;
  for (size_t place = 0; place < length; ++place) {
    std::optional<RotarySpec>& spec = of_kind[windows[place] ? 1 : 0];
    if (!spec.has_value()) spec = specification_of(fields, windows[place], options);
    specs.push_back(is_rotated(file, windows, place) ? spec : std::nullopt);
  }
  return specs;
}

json tables() {
  return {{"interleaved", interleaved.list()},
          {"half_split", half_split.list()},
          {"contiguous_sections", contiguous_sections.list()},
          {"interleaved_sections", interleaved_sections.list()},
          {"apart", apart.list()},
          {"rotated_if_sliding", rotated_if_sliding.list()},
          {"every_fourth_unrotated", every_fourth_unrotated.list()},
          {"scaled_if_full", scaled_if_full.list()}};
}

}  // namespace posembed::configuration::gguf
