// Rules of positions from a model's configuration: the rule of its type, with its own numbers.
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "configuration/keys.h"
#include "configuration/source.h"
#include "dispatcher/schema.h"
#include "posembed/positions.h"

namespace posembed::configuration {
namespace {

/// The part with the tokens' ids: the thinker of an Omni model.
Fields with_ids(const Fields& fields) {
  const json& thinker = get(fields, "thinker_config");
  return thinker.is_object() ? thinker : fields;
}

std::string rule_name(const Fields& fields) {
  std::string name = text_of(get(fields, "model_type"));
  const std::string suffix = "_thinker";
  if (name.size() > suffix.size() && name.substr(name.size() - suffix.size()) == suffix) {
    name.resize(name.size() - suffix.size());
  }
  return name;
}

/// Sets a number from the first of several keys that the configuration has.
template <typename Number>
void set(const Fields& fields, const std::vector<std::string>& keys, Number& number) {
  for (const std::string& key : keys) {
    const json& value = get(fields, key);
    if (value.is_null()) continue;
    check_number(key, value);
    if constexpr (std::is_same_v<Number, double>) {
      number = real(key, value);
    } else {
      number = whole(key, value);
    }
    return;
  }
}

/// Sets an id that the rule has.
void set_id(const Fields& fields, const std::string& name, std::optional<int64_t>& id) {
  if (id.has_value()) set(fields, {name + "_token_id", name + "_token_index"}, id);
}

/// The markers of a video with audio: vision_start audio_start … audio_end vision_end.
void set_shared(const Fields& fields, MropeRule& rule) {
  if (rule.shared.empty()) return;
  auto& starts = rule.shared[0];
  auto& ends = rule.shared[1];
  set(fields, {"vision_start_token_id"}, starts.first);
  set(fields, {"audio_start_token_id"}, starts.second);
  set(fields, {"audio_end_token_id"}, ends.first);
  set(fields, {"vision_end_token_id"}, ends.second);
}

/// MiniCPM-V's markers and the patches that it merges, which depend on a mode.
void set_canvas(const Fields& fields, MropeRule& rule) {
  if (rule.canvas.empty()) return;
  const char* keys[] = {"image_start_id", "image_end_id", "slice_start_id", "slice_end_id",
                        "newline_id"};
  for (size_t i = 0; i < rule.canvas.size(); ++i) set(fields, {keys[i]}, rule.canvas[i]);
  set(fields, {"image_token_id"}, rule.image_token);
  set(fields, {"video_token_id"}, rule.video_token);
  if (text_of(get(fields, "downsample_mode")) == "4x") rule.spatial_merge = 2;
}

/// HunYuan's axes: one for each section of the rotation.
void set_axes(const Fields& text, MropeRule& rule) {
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    const json& sections = get(get(text, key), "mrope_section");
    if (rule.pages && sections.is_array()) rule.axes = static_cast<int64_t>(sections.size());
  }
}

MropeRule mrope_rule(const Fields& config) {
  const Fields fields = with_ids(config);
  MropeRule rule = MropeRule::named(rule_name(config));
  const json& vision = get(fields, "vision_config");
  set_id(fields, "image", rule.image_token);
  set_id(fields, "video", rule.video_token);
  set_id(fields, "audio", rule.audio_token);
  set_id(fields, "video_start", rule.video_start);
  set_id(fields, "video_end", rule.video_end);
  set_shared(fields, rule);
  set_canvas(fields, rule);
  set(vision, {"spatial_merge_size"}, rule.spatial_merge);
  set(vision, {"temporal_merge_size"}, rule.temporal_merge);
  if (rule.time != MropeTime::index) {
    const bool interval = rule.time == MropeTime::interval;
    set(interval ? vision : fields, {interval ? "tokens_per_second" : "position_id_per_seconds"},
        rule.positions_per_second);
  }
  int64_t window = rule.audio_chunk / 2;
  if (rule.audio_chunk != 0) set(get(fields, "audio_config"), {"n_window"}, window);
  rule.audio_chunk = 2 * window;
  set_axes(get(fields, "text_config"), rule);
  return MropeRule::from_json(rule.to_json());  // checks the numbers
}

}  // namespace

TORCH_LIBRARY_IMPL(posembed, CompositeExplicitAutograd, m) {
  m.impl("mrope_rule_from_configuration",
         [](std::string_view config) { return mrope_rule(parse(std::string(config))).to_json(); });
}

}  // namespace posembed::configuration

namespace posembed {

MropeRule MropeRule::from_huggingface(const std::string& config) {
  return configuration::mrope_rule(configuration::load(config));
}

}  // namespace posembed
