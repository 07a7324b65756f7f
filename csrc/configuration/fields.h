// A configuration as its file has it: a JSON object, and what readers ask of its values. Truth,
// equality and printed forms are Python's, because the models' own code decides by them.
#pragma once

#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace posembed::configuration {

using nlohmann::json;

/// Keys and values: a JSON object.
using Fields = json;

/// The object that a text is, without names of classes, which only take memory. NaN and Infinity,
/// which Python writes, are read as texts.
/// Throws c10::ValueError for text that is no JSON, or no object.
Fields parse(const std::string& text);

/// The value of a key; null where there is none.
const json& get(const json& fields, const std::string& key);

/// Whether a value counts as true: not null, false, 0 or empty.
bool truthy(const json& value);

/// Whether two values are the same; false is 0 and true is 1.
bool equal(const json& left, const json& right);

/// A text as it is; empty for what is no text.
std::string text_of(const json& value);

/// A value as Python prints it, cut after `limit` characters.
std::string repr(const json& value, size_t limit = std::numeric_limits<size_t>::max());
std::string repr(const std::vector<std::string>& words);

/// The keys of both, with the values of `over` where both have one.
Fields merged(Fields fields, const Fields& over);

/// Sorted.
std::vector<std::string> keys_of(const Fields& fields);

}  // namespace posembed::configuration
