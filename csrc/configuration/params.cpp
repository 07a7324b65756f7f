#include "configuration/params.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>

#include "configuration/keys.h"
#include "configuration/layers.h"
#include "configuration/unknown_keys.h"
#include "configuration/words.h"

namespace posembed::configuration::params {
namespace {

// Keys that only these files have and that do not concern rotary positions. "llama_4_scaling"
// multiplies queries by a factor of their position, after the rotation.
constexpr Words no_bearing = R"(
causal llama_4_scaling moe multimodal n_kv_heads n_layers q_lora_rank quantization sliding_window
tied_embeddings use_biases v_head_dim vision_encoder
)";

/// YaRN with Mistral's names. apply_scale: whether queries and keys are multiplied; in latent
/// attention, as DeepSeek-V3 does it: the scores instead of the rotated components (vLLM's
/// deepseek_v2.py, with mscale_all_dim = 1 from its transformers_utils/configs/mistral.py).
YarnScaling mistral_yarn(Keys yarn, bool is_latent) {
  const char* length = "original_max_position_embeddings";
  YarnScaling scaling;
  scaling.factor = real("factor", yarn.need("factor"));
  scaling.original_max_positions = whole(length, yarn.need(length));
  scaling.beta_fast = real("beta", yarn.take("beta", 32.0));
  scaling.beta_slow = real("alpha", yarn.take("alpha", 1.0));
  if (!truthy(yarn.take("apply_scale", true))) {
    scaling.attention_factor = 1.0;
  } else if (is_latent) {
    scaling.mscale = scaling.mscale_all_dim = 1.0;
  }
  yarn.done();
  return scaling;
}

/// Llama 3's factor, which few files have: 8 in Llama 3.1 and in the large models of 3.2, 32 in its
/// models of 1B and 3B, as their config.json has it. The width tells them apart.
double llama3_factor(Keys& keys) {
  const json given = keys.take("rope_scaling_factor");
  if (!given.is_null()) return real("rope_scaling_factor", given);
  const int64_t width = whole("dim", keys.need("dim"));
  if (width == 2048 || width == 3072) return 32.0;
  TORCH_CHECK_VALUE(width == 4096 || width == 8192 || width == 16384,
                    "rope_scaling_factor: missing in params.json, and no Llama 3 has a dim of ",
                    width);
  return 8.0;
}

/// Whether rotated components are a head apart.
bool is_latent(Keys& keys) {
  const char* names[] = {"qk_rope_head_dim", "qk_nope_head_dim", "kv_lora_rank"};
  return std::count_if(std::begin(names), std::end(names),
                       [&](const char* name) { return truthy(keys.take(name)); }) > 0;
}

/// Llama 3's scaling, whose other numbers are only in Meta's code, or Mistral's YaRN.
RotaryScaling scaling_of(Keys& keys) {
  const json high = keys.take("rope_high_freq_factor", 4.0);
  const bool scaled = flag("use_scaled_rope", keys.take("use_scaled_rope", false));
  const bool named = flag("use_scaled", keys.take("use_scaled", false));
  const json yarn = keys.take("yarn");
  const bool llama3 = scaled || named;
  TORCH_CHECK_VALUE(!llama3 || !truthy(yarn), "yarn: expected none beside use_scaled_rope");
  if (llama3) return Llama3Scaling{llama3_factor(keys), 1.0, real("factor", high), 8192};
  keys.ignore({"rope_scaling_factor"});
  if (yarn.is_null()) return {};
  return mistral_yarn(Keys(yarn, "yarn"), is_latent(keys));
}

int64_t head_dim_of(Keys& keys) {
  if (is_latent(keys)) return whole("qk_rope_head_dim", keys.need("qk_rope_head_dim"));
  const json given = keys.first({"head_dim"});
  if (!given.is_null()) return whole("head_dim", given);
  const int64_t width = whole("dim", keys.need("dim"));
  const int64_t heads = whole("n_heads", keys.need("n_heads"));
  TORCH_CHECK_VALUE(heads > 0, "n_heads: expected a positive number, got ", heads);
  return width / heads;
}

double base_of(Keys& keys, const ConfigurationOptions& options) {
  const json stated = options.base().has_value() ? json(*options.base()) : json();
  const json theta = same("rope_theta", {keys.take("rope_theta"), stated});
  TORCH_CHECK_VALUE(!theta.is_null(),
                    "rope_theta: missing in params.json: pass base= (Llama 1 and 2: 10000)");
  return base_number("rope_theta", theta);
}

}  // namespace

bool is_params(const Fields& fields) {
  const std::string type = text_of(get(fields, "model_type"));
  const bool is_named = fields.contains("model_type") && type != "transformer";
  return fields.contains("n_heads") && fields.contains("dim") && !is_named;
}

RotarySpec read(const Fields& fields, const ConfigurationOptions& options) {
  if (options.layer_type().has_value()) check_type({}, *options.layer_type());
  Keys keys(fields, "params.json");
  const double base = base_of(keys, options);
  const RotaryScaling scaling = scaling_of(keys);
  RotarySpec spec(head_dim_of(keys));
  spec.base = base;
  spec.scaling = scaling;
  spec.interleaved = true;
  keys.ignore({"dim", "n_heads", "head_dim"});
  keys.ignore(no_bearing.list());
  check_understood(keys, {}, options.ignore());
  spec.check();
  return spec;
}

std::vector<std::optional<RotarySpec>> read_layers(const Fields& fields,
                                                   const ConfigurationOptions& options) {
  const int64_t length = whole("n_layers", Keys(fields, "params.json").need("n_layers"));
  TORCH_CHECK_VALUE(length >= 0, "n_layers: expected 0 or more, got ", length);
  return {static_cast<size_t>(length), read(fields, options)};
}

}  // namespace posembed::configuration::params
