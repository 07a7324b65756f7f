// Rules as JSON; mrope_rules.json has those of published models.
#include "positions/rule.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/brief.h"
#include "dispatcher/first_use.h"
#include "dispatcher/json.h"
#include "dispatcher/text_cache.h"
#include "positions/operator.h"

namespace posembed {
namespace {

using nlohmann::json;

/// By model type of transformers 5.23, whose get_rope_index each rule equals, but for ERNIE 4.5 VL,
/// PaddleOCR-VL and names that end in "_trained": these number text after a video as the models
/// were trained, from the latest position on any axis, as vLLM does (ernie45_vl.py,
/// paddleocr_vl.py). What is absent is MropeRule's default. Ids are those of its configuration
/// classes, except that Qwen2.5-VL's 2 positions per second and Qwen3-Omni's 13 and its audio id
/// are the checkpoints', and that MiniCPM-V has none: they come from a configuration.
constexpr const char* rules_text =
#include "positions/mrope_rules.inc"
    ;

const json& table() {
  static dispatcher::FirstUse<json> rules;
  return rules.get([] { return json::parse(rules_text); });
}

/// Calls visit(name, field) for each field of a rule.
template <typename Rule, typename Visit>
void for_each_field(Rule& rule, const Visit& visit) {
  visit("image_token", rule.image_token);
  visit("video_token", rule.video_token);
  visit("audio_token", rule.audio_token);
  visit("video_start", rule.video_start);
  visit("video_end", rule.video_end);
  visit("shared", rule.shared);
  visit("spatial_merge", rule.spatial_merge);
  visit("temporal_merge", rule.temporal_merge);
  visit("separate_frames", rule.separate_frames);
  visit("time", rule.time);
  visit("positions_per_second", rule.positions_per_second);
  visit("time_advances", rule.time_advances);
  visit("audio_chunk", rule.audio_chunk);
  visit("pages", rule.pages);
  visit("margin", rule.margin);
  visit("axes", rule.axes);
  visit("padding", rule.padding);
  visit("canvas", rule.canvas);
}

template <typename Field>
json as_json(const Field& field) {
  return field;
}

json as_json(const std::optional<int64_t>& field) {
  return field.has_value() ? json(*field) : json();
}

json as_json(MropeTime time) { return name(time); }

/// Reads a field; get() alone would truncate fractions and take numbers for true and false.
template <typename Field>
void read(const char* key, const json& value, Field& field) {
  if constexpr (std::is_same_v<Field, MropeTime>) {
    field = dispatcher::enum_from<MropeTime>(value.get<std::string>());
  } else if constexpr (std::is_same_v<Field, std::optional<int64_t>>) {
    field.emplace();
    read(key, value, *field);
  } else {
    TORCH_CHECK_VALUE(!(std::is_same_v<Field, int64_t>) || value.is_number_integer(), key,
                      ": expected a whole number, got ", value.dump());
    field = value.get<Field>();
  }
}

MropeRule parse(const json& object, const std::string& text) {
  MropeRule rule;
  size_t found = 0;
  for_each_field(rule, [&](const char* key, auto& field) {
    if (!object.contains(key)) return;
    ++found;
    if (!object.at(key).is_null()) read(key, object.at(key), field);
  });
  TORCH_CHECK_VALUE(found == object.size(), "MropeRule: expected keys ",
                    json::parse(MropeRule().to_json()).dump(), ", got ", core::brief(text));
  return rule;
}

void check_at_least(int64_t value, int64_t least, const char* field) {
  TORCH_CHECK_VALUE(value >= least, field, ": expected ", least, " or more, got ", value);
}

void check(const MropeRule& rule) {
  check_at_least(rule.spatial_merge, 1, "spatial_merge");
  check_at_least(rule.temporal_merge, 1, "temporal_merge");
  check_at_least(rule.audio_chunk, 0, "audio_chunk");
  check_at_least(rule.margin, 0, "margin");
  TORCH_CHECK_VALUE(rule.axes == 3 || (rule.pages && rule.axes == 4), "axes: expected 3",
                    rule.pages ? " or 4" : "", ", got ", rule.axes);
  TORCH_CHECK_VALUE(rule.canvas.empty() || rule.canvas.size() == 5, "canvas: expected 5 ids, got ",
                    rule.canvas.size());
  TORCH_CHECK_VALUE(rule.video_start.has_value() == rule.video_end.has_value(),
                    "video_end: expected an id if and only if there is one for video_start");
  TORCH_CHECK_VALUE(std::isfinite(rule.positions_per_second) && rule.positions_per_second > 0,
                    "positions_per_second: expected a positive number, got ",
                    rule.positions_per_second);
}

}  // namespace

const char* name(MropeTime time) {
  switch (time) {
    case MropeTime::index:
      return "index";
    case MropeTime::interval:
      return "interval";
    case MropeTime::elapsed:
      return "elapsed";
    case MropeTime::exact:
      return "exact";
  }
  return "unknown";
}

std::vector<std::string> MropeRule::names() {
  std::vector<std::string> names;
  for (const auto& entry : table().items()) names.push_back(entry.key());
  return names;
}

MropeRule MropeRule::named(const std::string& name) {
  if (!table().contains(name)) {
    std::string known;
    for (const std::string& each : names()) known += (known.empty() ? "'" : ", '") + each + "'";
    TORCH_CHECK_VALUE(false, "rule: expected one of ", known, ", got '", core::brief(name), "'");
  }
  return parse(table().at(name), name);
}

std::string MropeRule::to_json() const {
  json object;
  for_each_field(*this, [&](const char* key, const auto& field) { object[key] = as_json(field); });
  return object.dump();
}

MropeRule MropeRule::from_json(const std::string& text) {
  if (text.find('{') == std::string::npos) return named(text);
  try {
    const MropeRule rule = parse(dispatcher::parse_json("MropeRule", text), text);
    check(rule);
    return rule;
  } catch (const json::exception& error) {
    TORCH_CHECK_VALUE(false, "MropeRule: expected JSON text of a rule, got '", core::brief(text),
                      "': ", dispatcher::reason(error));
  }
}

bool MropeRule::operator==(const MropeRule& other) const { return to_json() == other.to_json(); }

namespace positions {
namespace {

struct ParsedRule : MropeRule {
  explicit ParsedRule(std::string_view text) : MropeRule(from_json(std::string(text))) {}
};

auto& rules = *new dispatcher::TextCache<ParsedRule>;

}  // namespace

std::shared_ptr<const MropeRule> rule_of(std::string_view text) { return rules.find(text); }

}  // namespace positions
}  // namespace posembed
