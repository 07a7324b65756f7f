// A configuration as in its file: a JSON object, and what readers ask of its values. Truth,
// equality and printed forms follow Python, because the models' own code relies on them.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace posembed::configuration {

using nlohmann::json;

/// Keys and values: a JSON object.
using Fields = json;

/// Parses a JSON object. Drops the names of classes, which only take memory. Reads NaN and
/// Infinity, which Python writes, as strings. Throws c10::ValueError for text that is not a JSON
/// object.
Fields parse(const std::string& text);

/// The value of a key; null if it is absent.
const json& get(const json& fields, const std::string& key);

/// Whether a value counts as true: not null, false, 0 or empty.
bool truthy(const json& value);

/// Whether two values are the same; false is 0 and true is 1.
bool equal(const json& left, const json& right);

/// The value of a string; empty for other values.
std::string text_of(const json& value);

/// A value as Python prints it, with at most `limit` bytes.
std::string repr(const json& value, size_t limit = 500);
std::string repr(const std::vector<std::string>& words);

/// The keys of both objects; if both have a key, the value of `over`.
Fields merged(Fields fields, const Fields& over);

/// The keys, sorted.
std::vector<std::string> keys_of(const Fields& fields);

}  // namespace posembed::configuration
