#include "configuration/unknown_keys.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <string_view>

#include "configuration/words.h"

namespace posembed::configuration {
namespace {

constexpr std::string_view about_positions[] = {
    "rope", "rotary",  "rot_",     "theta",   "freq",   "yarn",       "ntk",       "alibi",
    "nope", "pos_emb", "position", "scaling", "mscale", "wavelength", "timescale",
};

/// Keys that contain such a word and do not affect the rotation.
constexpr Words others = R"(
apply_query_key_layer_scaling attention_scaling embedding_scaling lm_head_scaling logits_scaling
max_source_positions max_target_positions n_positions num_positions residual_scaling
routed_scaling_factor
)";

/// What position_embedding_type says of a model that rotates.
constexpr Words rotations = "rope rope_gptj rotary";

/// Nested configurations are separate parts, except those about attention and rotation.
bool is_part(std::string_view key) {
  const auto ends_in = [&](std::string_view text) {
    return key.size() >= text.size() && key.substr(key.size() - text.size()) == text;
  };
  return ends_in("_config") && !ends_in("attn_config") && !ends_in("rope_config");
}

/// Whether a key or, in a block, a member may change the rotation.
bool concerns_positions(const std::string& key, const json& value) {
  if (is_part(key) || others.has(key)) return false;
  if (key == "position_embedding_type" && rotations.has(text_of(value))) return false;
  const bool named =
      std::any_of(std::begin(about_positions), std::end(about_positions),
                  [&](std::string_view word) { return key.find(word) != std::string::npos; });
  if (named || !value.is_object()) return named;
  const auto members = value.items();
  return std::any_of(members.begin(), members.end(), [](const auto& member) {
    return concerns_positions(member.key(), member.value());
  });
}

}  // namespace

void check_understood(const Keys& keys, const std::set<std::string>& accounted,
                      const std::vector<std::string>& ignore) {
  std::vector<std::string> unknown;
  for (const std::string& key : keys.left()) {
    const bool ignored = std::find(ignore.begin(), ignore.end(), key) != ignore.end();
    const bool known = ignored || accounted.count(key) > 0;
    if (!known && concerns_positions(key, get(keys.fields(), key))) unknown.push_back(key);
  }
  TORCH_CHECK_VALUE(unknown.empty(), keys.where(),
                    ": keys that are not understood: ", repr(unknown),
                    ": pass ignore=", repr(unknown), " if they do not concern rotary positions");
}

}  // namespace posembed::configuration
