#include "configuration/rope_parameters.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "configuration/catalogue.h"
#include "configuration/words.h"

namespace posembed::configuration {
namespace {

const std::vector<std::string> bases = {"rope_theta", "rotary_emb_base", "rotary_embedding_base"};
const std::vector<std::string> local_bases = {"rope_local_base_freq", "local_rope_theta",
                                              "swa_rope_theta"};
const std::vector<std::string> other_bases = {"global_rope_theta", "compress_rope_theta"};

/// Rejects a base outside rope_parameters that none of them has.
void check_nested(const Fields& fields, const Fields& rope) {
  std::vector<json> nested;
  for (const auto& each : rope.items()) {
    if (each.value().is_object()) nested.push_back(get(each.value(), "rope_theta"));
  }
  for (const std::string& key : all_bases()) {
    const json& given = get(fields, key);
    if (given.is_null() || given.is_array()) continue;
    const bool known = std::any_of(nested.begin(), nested.end(),
                                   [&](const json& base) { return equal(base, given); });
    json all = json::array({given});
    for (const json& base : nested) all.push_back(base);
    TORCH_CHECK_VALUE(known, key, ": the configuration contradicts itself: ", repr(all), ", with ",
                      repr(keys_of(rope)));
  }
}

/// Layers with a second base, as in Gemma 3 and ModernBERT: local layers are not scaled.
Fields with_local_base(const Fields& rope, const json& base, const json& local) {
  return {{"full_attention", merged(rope, {{"rope_theta", base}})},
          {"sliding_attention", {{"rope_theta", local}}}};
}

/// DeepSeek-V4's layers, whose code has no attention factor.
Fields with_compressed_base(const Fields& rope, const json& base, const json& compressed) {
  const bool yarn = std::find(rope.begin(), rope.end(), json("yarn")) != rope.end();
  const Fields factor = yarn ? Fields{{"attention_factor", 1.0}} : Fields::object();
  return {{"main", {{"rope_theta", base}}},
          {"compress", merged(merged(factor, rope), {{"rope_theta", compressed}})}};
}

/// Whether a list says that only some layers are scaled (Molmo 2).
bool has_unscaled_layers(const Fields& fields) {
  const json& scaled = get(fields, "rope_scaling_layers");
  return !scaled.is_null() && scaled.size() < count_of_layers(fields).value_or(0);
}

/// rope_parameters of files from before they were nested: a second base beside rope_theta.
Fields from_bases(const Fields& fields, const Fields& rope) {
  Fields own = Fields::object();
  for (const std::string& key : all_bases()) own[key] = get(fields, key);
  Keys given(own, "");
  const json theta = given.same(bases), local = given.same(local_bases);
  const json compressed = given.take("compress_rope_theta");
  if (!local.is_null()) {
    return with_local_base(rope, given.take("global_rope_theta", theta), local);
  }
  if (!compressed.is_null()) return with_compressed_base(rope, theta, compressed);
  const json base = same("rope_theta", {get(rope, "rope_theta"), theta});
  const Fields plain = {{"rope_theta", base}};
  const Fields scaled = merged(rope, plain);
  if (catalogue::of(fields).contains("scaled")) {
    return {{"full_attention", scaled}, {"sliding_attention", plain}};
  }
  if (has_unscaled_layers(fields)) return {{"scaled", scaled}, {"unscaled", plain}};
  return scaled;
}

/// The key of a kind of layer in rope_parameters.
std::string label(const Fields& fields, const Kind& kind, const Fields& rope) {
  const std::string name = kind.value_or("None");
  if (!catalogue::of(fields).contains("compressed") || rope.contains(name)) return name;
  return name == "sliding_attention" ? "main" : "compress";
}

/// What some files repeat beside the kinds of layers, which transformers passes over.
constexpr Words shared_keys = "factor partial_rotary_factor rope_theta rope_type type";

/// Rejects other keys than those of kinds of layers.
void check_kinds(const Fields& rope) {
  Keys every(rope, "rope_parameters");
  every.ignore(shared_keys.list());
  for (const auto& each : rope.items()) {
    if (each.value().is_object()) every.ignore({each.key()});
  }
  every.done();
}

}  // namespace

std::vector<std::string> all_bases() {
  std::vector<std::string> keys;
  for (const auto& some : {bases, local_bases, other_bases}) {
    keys.insert(keys.end(), some.begin(), some.end());
  }
  return keys;
}

bool is_nested(const Fields& rope) {
  return std::any_of(rope.begin(), rope.end(), [](const json& value) { return value.is_object(); });
}

Fields legacy(const Fields& fields) {
  const json parameters = get(fields, "rope_parameters");
  const json scaling = truthy(get(fields, "rope_scaling")) ? get(fields, "rope_scaling") : json();
  if (!parameters.is_null()) check_mapping(parameters, "rope_parameters");
  if (!scaling.is_null()) check_mapping(scaling, "rope_scaling");
  const json given = same("rope_scaling", {parameters, scaling});
  const Fields rope = given.is_null() ? Fields::object() : given;
  if (!is_nested(rope)) return from_bases(fields, rope);
  for (const std::string& key : shared_keys.list()) {
    const json& value = get(rope, key);
    TORCH_CHECK_VALUE(!value.is_object(), key, ": expected a number or a name, got ", repr(value));
  }
  check_nested(fields, rope);
  return rope;
}

std::vector<Fields> blocks(const Fields& rope) {
  std::vector<Fields> nested;
  for (const json& value : rope) {
    if (value.is_object()) nested.push_back(value);
  }
  return nested.empty() ? std::vector<Fields>{rope} : nested;
}

std::optional<Keys> parameters(Keys& config, const Kind& kind) {
  config.ignore({"rope_parameters", "rope_scaling", "rope_scaling_layers"});
  config.ignore(all_bases());
  if (catalogue::of(config.fields()).contains("scaled")) {
    same("yarn_only_types", {config.take("yarn_only_types"), json::array({"full_attention"})});
  }
  Fields rope = legacy(config.fields());
  if (is_nested(rope)) {
    check_kinds(rope);
    json own = get(rope, label(config.fields(), kind, rope));
    if (own.is_null()) return std::nullopt;
    rope = std::move(own);
  }
  json name = "default";
  for (const char* key : {"type", "rope_type"}) {
    if (rope.contains(key)) name = rope[key];
  }
  return Keys(rope, "rope_parameters of type " + repr(name));
}

json own_base(Keys& config) { return config.take("layer_rope_theta"); }

}  // namespace posembed::configuration
