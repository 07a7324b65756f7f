#include "configuration/unknown_keys.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cctype>
#include <string_view>

#include "configuration/words.h"

namespace posembed::configuration {
namespace {

/// Words of keys about positions.
constexpr Words about_positions = R"(
alibi freq freqs mscale nope ntk pos posemb rot scaling theta timescale wavelength yarn
)";
constexpr std::string_view beginnings[] = {"rope", "rota", "position"};

/// Keys with such words that do not affect the rotation, beside those of experts.
constexpr Words others = R"(
apply_query_key_layer_scaling attention_scaling embedding_scaling first_k_layer_freq lm_head_scaling
logits_scaling max_source_positions max_target_positions mlp_layer_freq n_positions num_positions
residual_scaling routed_scaling_factor use_pos_enc
)";
constexpr std::string_view experts[] = {"moe_", "router_", "mtp_"};

/// What position_embedding_type says of a model that rotates.
constexpr Words rotations = "rope rope_gptj rotary";

bool begins(std::string_view text, std::string_view with) {
  return text.substr(0, with.size()) == with;
}

bool ends(std::string_view text, std::string_view with) {
  return text.size() >= with.size() && text.substr(text.size() - with.size()) == with;
}

bool is_about_positions(const std::string& word) {
  return about_positions.has(word) || ends(word, "rope") ||
         std::any_of(std::begin(beginnings), std::end(beginnings),
                     [&](std::string_view beginning) { return begins(word, beginning); });
}

/// The words of a key in lower case: "RoPE_base" has "rope" and "base".
std::vector<std::string> words_of(const std::string& key) {
  std::vector<std::string> words(1);
  for (const char character : key) {
    const auto byte = static_cast<unsigned char>(character);
    if (std::isalnum(byte) != 0) {
      words.back() += static_cast<char>(std::tolower(byte));
    } else if (!words.back().empty()) {
      words.emplace_back();
    }
  }
  return words;
}

bool names_positions(const std::string& key) {
  const bool of_experts = std::any_of(std::begin(experts), std::end(experts),
                                      [&](std::string_view prefix) { return begins(key, prefix); });
  if (of_experts || others.has(key)) return false;
  const std::vector<std::string> words = words_of(key);
  return std::any_of(words.begin(), words.end(), is_about_positions);
}

/// Whether a key or, in a block, a member may change the rotation. Nested configurations are
/// separate parts, except those about attention.
bool concerns_positions(const std::string& key, const json& value) {
  if (key == "position_embedding_type" && rotations.has(text_of(value))) return false;
  if (names_positions(key)) return true;
  if (!value.is_structured() || (ends(key, "_config") && !ends(key, "attn_config"))) return false;
  const auto members = value.items();
  return std::any_of(members.begin(), members.end(), [&](const auto& member) {
    return concerns_positions(value.is_array() ? std::string() : member.key(), member.value());
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
