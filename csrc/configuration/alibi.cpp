#include "configuration/alibi.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <string>

#include "configuration/gguf.h"
#include "configuration/gguf_architectures.h"
#include "configuration/keys.h"
#include "configuration/source.h"
#include "posembed/alibi.h"

namespace posembed::configuration {
namespace {

json preset_of(const char* name, int64_t num_heads, json options = json::object()) {
  return {{"name", name}, {"num_heads", num_heads}, {"options", std::move(options)}};
}

/// The number of heads. Its key differs between models and their versions.
int64_t alibi_heads(Keys& config) {
  const json heads = config.same({"num_attention_heads", "n_head", "n_heads"});
  TORCH_CHECK_VALUE(!heads.is_null(), "num_attention_heads: missing in the configuration");
  return whole("num_attention_heads", heads);
}

/// Rejects models that use another kind of positions.
void check_alibi(const json& used, const char* key) {
  TORCH_CHECK_VALUE(truthy(used), key, ": the model does not use ALiBi, got ", repr(used));
}

/// Rejects models whose position_embedding_type is not ALiBi.
void check_alibi_kind(Keys& config) {
  const json kind = config.need("position_embedding_type");
  TORCH_CHECK_VALUE(kind == "alibi", "position_embedding_type: expected 'alibi', got ", repr(kind));
}

/// Bloom and Refact always use ALiBi.
json bloom_preset(Keys& config) { return preset_of("bloom", alibi_heads(config)); }
json refact_preset(Keys& config) { return preset_of("refact", alibi_heads(config)); }

/// MPT's attention has its own configuration.
json mpt_preset(Keys& config) {
  Keys attention(config.need("attn_config"), "attn_config");
  check_alibi(attention.need("alibi"), "attn_config['alibi']");
  const double max_bias = real("alibi_bias_max", attention.take("alibi_bias_max", 8));
  attention.done("alibi");
  return preset_of("mpt", alibi_heads(config), {{"max_bias", max_bias}});
}

/// Falcon-RW; later Falcon models rotate.
json falcon_preset(Keys& config) {
  check_alibi(config.need("alibi"), "alibi");
  const int64_t heads = alibi_heads(config);
  TORCH_CHECK_VALUE(heads > 0, "num_attention_heads: expected a positive number, got ", heads);
  const int64_t width = whole("hidden_size", config.need("hidden_size"));
  return preset_of("falcon", heads, {{"head_dim", width / heads}});
}

/// The 13B models. The 7B models rotate, and only they have max_position_embeddings.
json baichuan_preset(Keys& config) {
  TORCH_CHECK_VALUE(config.take("max_position_embeddings").is_null(),
                    "max_position_embeddings: Baichuan-7B, which has it, does not use ALiBi");
  return preset_of("baichuan", alibi_heads(config));
}

/// JAIS and BTLM, which share code, may scale their slopes.
json scaled_preset(const char* name, Keys& config) {
  check_alibi_kind(config);
  Keys scaling(config.take("alibi_scaling", json::object()), "alibi_scaling");
  const json type = scaling.take("type", "linear");
  TORCH_CHECK_VALUE(type == "linear", "alibi_scaling: expected type 'linear', got ", repr(type));
  const json factor = scaling.take("factor"), length = scaling.take("train_seq_len");
  scaling.done();
  json options = json::object();
  if (!factor.is_null()) {
    options["factor"] = real("factor", factor);
  } else if (!length.is_null()) {
    options["train_length"] = whole("train_seq_len", length);
  }
  return preset_of(name, alibi_heads(config), options);
}

json jais_preset(Keys& config) { return scaled_preset("jais", config); }
json btlm_preset(Keys& config) { return scaled_preset("btlm", config); }

/// MosaicBERT and jina-embeddings-v2, both of model type "bert".
json bert_preset(Keys& config) {
  if (!config.take("alibi_starting_size").is_null()) {  // only MosaicBERT has it
    return preset_of("mosaicbert", alibi_heads(config));
  }
  check_alibi_kind(config);
  return preset_of("jina", alibi_heads(config));
}

struct PresetReader {
  const char* model_type;
  json (*read)(Keys& config);
};
constexpr PresetReader preset_readers[] = {
    {"bloom", bloom_preset},
    {"mpt", mpt_preset},
    {"falcon", falcon_preset},
    {"RefinedWeb", falcon_preset},
    {"RefinedWebModel", falcon_preset},
    {"baichuan", baichuan_preset},
    {"jais", jais_preset},
    {"btlm", btlm_preset},
    {"gpt_refact", refact_preset},
    {"bert", bert_preset},
};

std::string known_types() {
  std::string names;
  for (const PresetReader& reader : preset_readers) {
    names += (names.empty() ? "'" : ", '") + std::string(reader.model_type) + "'";
  }
  return names;
}

/// GGUF metadata: the table has the family, and the bias of those that have no key for it.
json gguf_preset(const Fields& fields) {
  const std::string architecture = text_of(get(fields, "general.architecture"));
  const json& rules = get(get(gguf::table(), "architectures"), architecture);
  const json& alibi = rules.is_null() ? rules : get(rules, "alibi");
  TORCH_CHECK_VALUE(!alibi.is_null(), "general.architecture: expected one with ALiBi, got ",
                    repr(json(architecture)));
  Keys config(gguf::keys_of_architecture(fields, architecture), "the metadata");
  const json& layers = get(alibi, "block_count");
  TORCH_CHECK_VALUE(layers.is_null() || equal(config.need("block_count"), layers),
                    "block_count: only the model of ", repr(layers), " layers uses ALiBi, got ",
                    repr(config.take("block_count")));
  const char *key = "attention.max_alibi_bias", *heads = "attention.head_count";
  const json& known = get(alibi, "max_bias");
  const json bias = same(key, {config.take(key), known.is_number() ? known : json()});
  check_alibi(bias, key);
  const int64_t num_heads = whole(heads, config.need(heads));
  config.done("alibi");
  return preset_of(text_of(get(alibi, "preset")).c_str(), num_heads,
                   {{"max_bias", real(key, bias)}});
}

}  // namespace

json alibi_preset(const Fields& fields) {
  if (gguf::is_metadata(fields)) return gguf_preset(fields);
  const json& model_type = get(fields, "model_type");
  const auto* reader =
      std::find_if(std::begin(preset_readers), std::end(preset_readers),
                   [&](const PresetReader& each) { return model_type == each.model_type; });
  TORCH_CHECK_VALUE(reader != std::end(preset_readers), "model_type: expected one of ",
                    known_types(), ", got ", repr(model_type));
  Keys config(fields, "the configuration");
  json preset = reader->read(config);
  config.done("alibi");
  return preset;
}

}  // namespace posembed::configuration

namespace posembed {

ALiBiOptions ALiBiOptions::from_config(const std::string& config) {
  using configuration::json;
  const json found = configuration::alibi_preset(configuration::load(config));
  const json& numbers = found.at("options");
  std::optional<int64_t> head_dim;
  if (numbers.contains("head_dim")) head_dim = numbers.at("head_dim").get<int64_t>();
  ALiBiOptions options =
      preset(found.at("name").get<std::string>(), found.at("num_heads").get<int64_t>(), head_dim);
  if (numbers.contains("max_bias")) options.max_bias(numbers.at("max_bias").get<double>());
  if (numbers.contains("factor")) options.factor(numbers.at("factor").get<double>());
  if (numbers.contains("train_length")) {
    options.train_length(numbers.at("train_length").get<int64_t>());
  }
  return options;
}

}  // namespace posembed
