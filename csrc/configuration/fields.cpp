#include "configuration/fields.h"

#include <c10/util/Exception.h>

#include <string_view>

#include "configuration/limits.h"
#include "core/brief.h"
#include "dispatcher/json.h"

namespace posembed::configuration {
namespace {

/// The length of the quoted string that begins at `begin`.
size_t quoted_length(std::string_view text, size_t begin) {
  size_t end = begin + 1;
  while (end < text.size() && text[end] != '"') end += text[end] == '\\' ? 2 : 1;
  return std::min(end + 1, text.size()) - begin;
}

/// Quotes NaN and Infinity, which JSON lacks, outside of strings.
std::string with_quoted_infinities(std::string_view text) {
  std::string result;
  for (size_t at = 0; at < text.size();) {
    size_t length = text[at] == '"' ? quoted_length(text, at) : 1;
    bool is_number = false;
    for (const std::string_view name : {"NaN", "Infinity", "-Infinity"}) {
      if (text.substr(at, name.size()) != name) continue;
      is_number = true;
      length = name.size();
    }
    if (is_number) result += '"';
    result += text.substr(at, length);
    if (is_number) result += '"';
    at += length;
  }
  return result;
}

/// Rejects names that no model has: they would fill messages.
void check_name(const std::string& name) {
  constexpr size_t longest = 256;
  TORCH_CHECK_VALUE(name.size() <= longest, "config: expected names of at most ", longest,
                    " bytes, got '", core::brief(name), "'");
}

/// Whether the parser keeps a value. Drops the names of classes, because each layer's view of a
/// configuration would copy thousands of them.
bool is_kept(int depth, json::parse_event_t event, const json& parsed) {
  dispatcher::check_json_depth("config", depth);
  if (event != json::parse_event_t::key) return true;
  check_name(parsed.get_ref<const std::string&>());
  return parsed != "id2label" && parsed != "label2id";
}

/// The keys by whose values models are recognised.
constexpr const char* naming_keys[] = {"model_type", "general.architecture"};

json as_number(const json& value) { return value.is_boolean() ? json(value ? 1 : 0) : value; }

std::string joined(const json& values, const char* open, const char* close) {
  std::string result = open;
  for (const auto& each : values.items()) {
    if (result.size() > 1) result += ", ";
    if (values.is_object()) result += repr(json(each.key())) + ": ";
    result += repr(each.value());
  }
  return result + close;
}

std::string printed(const json& value) {
  if (value.is_null()) return "None";
  if (value.is_boolean()) return value ? "True" : "False";
  if (value.is_string()) return "'" + core::brief(value.get_ref<const std::string&>()) + "'";
  if (value.is_array()) return joined(value, "[", "]");
  if (value.is_object()) return joined(value, "{", "}");
  return value.dump();
}

}  // namespace

Fields parse(const std::string& text) {
  Fields fields;
  try {
    fields = json::parse(with_quoted_infinities(text), is_kept);
  } catch (const json::exception& error) {
    TORCH_CHECK_VALUE(false, "config: expected JSON: ", dispatcher::reason(error));
  }
  TORCH_CHECK_VALUE(fields.is_object(), "config: expected a file with a JSON object, got ",
                    repr(fields, 40));
  for (const char* key : naming_keys) check_name(text_of(get(fields, key)));
  check_counts(fields);
  return fields;
}

const json none;

const json& get(const json& fields, const std::string& key) {
  const auto found = fields.find(key);
  return found == fields.end() ? none : *found;
}

bool truthy(const json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number()) return value != 0;
  if (value.is_string()) return !value.get_ref<const std::string&>().empty();
  return !value.empty();
}

bool equal(const json& left, const json& right) { return as_number(left) == as_number(right); }

std::string text_of(const json& value) {
  return value.is_string() ? value.get<std::string>() : std::string();
}

std::string repr(const json& value, size_t limit) { return core::brief(printed(value), limit); }

std::string repr(const std::vector<std::string>& words) { return repr(json(words)); }

Fields merged(Fields fields, const Fields& over) {
  for (const auto& each : over.items()) fields[each.key()] = each.value();
  return fields;
}

std::vector<std::string> keys_of(const Fields& fields) {
  std::vector<std::string> keys;
  for (const auto& each : fields.items()) keys.push_back(each.key());
  return keys;
}

}  // namespace posembed::configuration
