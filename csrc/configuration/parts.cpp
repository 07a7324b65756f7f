#include "configuration/parts.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "configuration/catalogue.h"
#include "configuration/words.h"

namespace posembed::configuration {
namespace {

using Path = std::vector<std::string>;

/// Keys that may contain the text model's configuration, in any part.
constexpr const char* text_parts[] = {"text_config", "thinker_config", "llm_config",
                                      "language_config", "vlm_config"};
const std::string part_end = "_config";

bool is_part_name(const std::string& key) {
  return key.size() >= part_end.size() &&
         key.compare(key.size() - part_end.size(), part_end.size(), part_end) == 0;
}

Fields nested(const Fields& fields, const std::string& name) {
  const json& part = get(fields, name);
  TORCH_CHECK_TYPE(part.is_object(), name,
                   ": expected a dict, a PretrainedConfig or the path of a config.json, got ",
                   repr(part, 40));
  return part;
}

Path path_of_text(const Fields& fields) {
  const auto* name = std::find_if(std::begin(text_parts), std::end(text_parts),
                                  [&](const char* key) { return truthy(get(fields, key)); });
  if (name == std::end(text_parts)) return {};
  Path path = path_of_text(nested(fields, *name));
  path.insert(path.begin(), *name);
  return path;
}

/// Splits a text at dots.
Path split(const std::string& text) {
  Path words;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('.', begin), text.size());
    words.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

void check_part(const Fields& fields, const std::string& name) {
  Path known;
  for (const auto& each : fields.items()) {
    if (is_part_name(each.key()) && truthy(each.value())) known.push_back(each.key());
  }
  TORCH_CHECK_VALUE(
      std::find(known.begin(), known.end(), name) != known.end(), "part: expected ",
      known.empty() ? "none for a configuration without parts" : "one of " + repr(known), ", got ",
      repr(json(name)));
}

/// The model type of a part that does not state one.
std::string part_type(const std::string& whole, const std::string& text,
                      const std::optional<std::string>& part) {
  if (!part.has_value() || *part == "text_config") return text;
  const size_t length = is_part_name(*part) ? part->size() - part_end.size() : part->size();
  return whole + "_" + part->substr(0, length);
}

}  // namespace

std::optional<std::string> layer_part(const std::optional<std::string>& part) {
  constexpr Words names = "attention indexer linear_attention";
  if (!part.has_value()) return std::nullopt;
  const std::string last = split(*part).back();
  return names.has(last) ? std::optional<std::string>(last) : std::nullopt;
}

Path path_of(const Fields& fields, const std::optional<std::string>& part) {
  Path path = part.has_value() ? split(*part) : Path();
  if (layer_part(part).has_value()) path.pop_back();
  if (path.empty()) return path_of_text(fields);
  Fields inside = fields;
  for (const std::string& name : path) {
    check_part(inside, name);
    inside = nested(inside, name);
  }
  return path;
}

Fields normalised(Fields fields) {
  const json base = get(get(fields, "attn_config"), "rope_theta");
  if (!base.is_null()) fields["rope_theta"] = base;  // DBRX
  return fields;
}

Fields typed(const Fields& fields, const std::optional<std::string>& part) {
  Fields chosen = catalogue::with_parts(normalised(fields));
  for (const std::string& name : path_of(chosen, part)) chosen = nested(chosen, name);
  const std::string whole = text_of(get(fields, "model_type"));
  const json& text = get(catalogue::of(whole), "text");
  const json& own = get(chosen, "model_type");
  if (text.is_null() || (truthy(own) && own != whole)) return chosen;
  chosen["model_type"] = part_type(whole, text_of(text), part);
  return chosen;
}

}  // namespace posembed::configuration
