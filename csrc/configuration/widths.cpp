#include "configuration/widths.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

#include "configuration/scalings.h"
#include "rotary/kernel.h"

namespace posembed::configuration {
namespace {

const std::vector<std::string> head_widths = {"head_dim", "attention_head_dim", "kv_channels"};
// If a vision tower has embed_dim, its hidden_size is the width of the language model.
const std::vector<std::string> model_widths = {"embed_dim", "hidden_size", "n_embd", "d_model",
                                               "dim"};
const std::vector<std::string> head_counts = {"num_attention_heads",
                                              "num_heads",
                                              "n_head",
                                              "n_heads",
                                              "encoder_num_attention_heads",
                                              "speech_encoder_attention_heads"};

/// Video trackers rotate in their memory attention.
int64_t memory_head_width(Keys& config) {
  const auto number = [&](const std::string& name) {
    const std::string key = "memory_attention_" + name;
    return whole(key, config.need(key));
  };
  const int64_t width = number("hidden_size"), rate = number("downsample_rate");
  const int64_t heads = number("num_attention_heads");
  TORCH_CHECK_VALUE(rate > 0 && heads > 0,
                    "memory_attention_num_attention_heads: expected a positive number");
  return width / rate / heads;
}

int64_t number_or_zero(Keys& config, const std::string& key) {
  return whole(key, config.take(key, 0));
}

/// partial_rotary_factor under any of its names; null if the configuration has none.
json stated_part(Keys& config, Keys& rope) {
  const char* key = "partial_rotary_factor";
  return same(key, {rope.take(key), config.take(key), config.take("rotary_pct")});
}

/// Rejects a partial_rotary_factor that qk_rope_head_dim overrides with another width.
void check_part_of_head(Keys& config, const json& part, int64_t own, const json& rules) {
  if (part.is_null() || rules.contains("layer_parts")) return;
  const double factor = real("partial_rotary_factor", part);
  bool agrees = factor == 1.0;
  for (const char* key : {"head_dim", "qk_head_dim", "qk_nope_head_dim"}) {
    const json width = config.take(key);
    if (width.is_null()) continue;
    const int64_t head = whole(key, width) + (std::string(key) == "qk_nope_head_dim" ? own : 0);
    agrees = agrees || static_cast<int64_t>(static_cast<double>(head) * factor) == own;
  }
  TORCH_CHECK_VALUE(agrees, "partial_rotary_factor: the configuration contradicts itself: ", factor,
                    " of no head is qk_rope_head_dim, ", own);
}

/// CLVP rotates half of a separate width.
Widths clvp_widths(Keys& config) {
  const int64_t heads = whole("num_attention_heads", config.need("num_attention_heads"));
  const int64_t projection = whole("projection_dim", config.need("projection_dim"));
  TORCH_CHECK_VALUE(heads > 0, "num_attention_heads: expected a positive number, got ", heads);
  return {head_width(config), std::max<int64_t>(projection / (2 * heads), 32)};
}

/// The rotated width of heads, unless qk_rope_head_dim gives it.
int64_t rotary_width(int64_t head_dim, json part, const json& stated, const json& rules) {
  if (part.is_null() && get(rules, "width") == "partial_rotary_factor") part = 1.0;
  json by_part;
  if (!part.is_null()) {
    by_part =
        static_cast<int64_t>(static_cast<double>(head_dim) * real("partial_rotary_factor", part));
  }
  const json width = same("rotary_dim", {stated, by_part});
  return width.is_null() ? head_dim : whole("rotary_dim", width);
}

}  // namespace

void check_rotated(int64_t rotary_dim) {
  constexpr int64_t most = 2 * rotary::max_pairs;
  TORCH_CHECK_VALUE(rotary_dim <= most, "rotary_dim: expected at most ", most, ", got ",
                    rotary_dim);
}

int64_t head_width(Keys& config) {
  const json given = config.first(head_widths);
  const json width = config.first(model_widths), heads = config.first(head_counts);
  if (!given.is_null()) return whole("head_dim", given);
  if (truthy(config.take("memory_attention_hidden_size"))) return memory_head_width(config);
  TORCH_CHECK_VALUE(
      !width.is_null() && !heads.is_null(),
      "head_dim: missing in the configuration, and it has not both of hidden_size and ",
      "num_attention_heads; it has ", repr(keys_of(config.fields())));
  const int64_t count = whole("num_attention_heads", heads);
  TORCH_CHECK_VALUE(count > 0, "num_attention_heads: expected a positive number, got ", count);
  return whole("hidden_size", width) / count;
}

int64_t latent_width(Keys& config) {
  return number_or_zero(config, "qk_nope_head_dim") + number_or_zero(config, "qk_rope_head_dim");
}

Widths widths_of(Keys& config, Keys& rope, const json& rules) {
  const json part = stated_part(config, rope);
  const json apart = config.take("qk_rope_head_dim");
  const json stated = config.same({"rotary_dim", "attn_rotary_emb"});
  config.ignore({"qk_nope_head_dim", "qk_head_dim", "projection_dim"});
  // These do not matter if heads have their own width.
  for (const auto& keys : {head_widths, model_widths, head_counts}) config.ignore(keys);
  if (get(rules, "width") == "half_of_projection") return clvp_widths(config);
  const bool is_apart = truthy(apart);
  const int64_t own = is_apart ? whole("qk_rope_head_dim", apart) : 0;
  // The rotated components are a separate head.
  if (is_apart && !rules.contains("trailing")) {
    check_part_of_head(config, part, own, rules);
    return {own, own};
  }
  const int64_t head_dim = head_width(config);
  if (is_apart && part.is_null()) return {head_dim, own};  // a window of the head, DeepSeek-V4's
  if (rope_type(rope) == "proportional") return {head_dim, head_dim};
  return {head_dim, rotary_width(head_dim, part, is_apart ? json(own) : stated, rules)};
}

}  // namespace posembed::configuration
