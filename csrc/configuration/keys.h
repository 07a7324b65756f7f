// Strict reading of a dictionary: unknown and missing keys raise, and so do words for numbers.
// Everything here throws c10::ValueError, whose text begins with the key.
#pragma once

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "configuration/fields.h"

namespace posembed::configuration {

/// A dictionary whose keys are taken one by one; done() refuses those that are left.
class Keys {
 public:
  /// Keys that are null count as absent. `where` is what the dictionary is, for messages.
  Keys(const Fields& fields, std::string where);

  /// The value of a key that may be absent.
  json take(const std::string& key, json otherwise = nullptr);
  /// The value of a key that must be there.
  json need(const std::string& key);
  /// Whether the key is there, be it with null.
  bool has(const std::string& key) const { return names_.count(key) > 0; }
  /// The value of the first key that is there and is not zero; null otherwise.
  json first(const std::vector<std::string>& keys);
  /// The one value that several keys agree on; null where none is there.
  json same(const std::vector<std::string>& keys);
  /// Accepts keys that do not matter here.
  void ignore(const std::vector<std::string>& keys) { accepted_.insert(keys.begin(), keys.end()); }

  /// The keys that contain a word and were neither taken nor accepted.
  std::vector<std::string> left(const std::string& containing = "") const;
  /// Refuses keys that contain a word and were not taken.
  void done(const std::string& containing = "") const;

  /// Without keys that are null.
  const Fields& fields() const { return fields_; }
  const std::string& where() const { return where_; }

 private:
  std::set<std::string> names_;
  Fields fields_;
  std::string where_;
  std::set<std::string> accepted_;
};

/// Refuses what is not a dictionary.
void check_mapping(const json& value, const std::string& where);

/// The one value that several places agree on; null where no place has one.
json same(const std::string& key, const std::vector<json>& values);

/// Refuses an argument that would have no effect.
void check_effect(const std::string& name, const json& value, const std::string& why);

/// Refuses what is not a number.
void check_number(const std::string& key, const json& value);
/// A number as a double.
double real(const std::string& key, const json& value);
/// The same, or none for null.
std::optional<double> optional_real(const std::string& key, const json& value);
/// A list of numbers.
std::vector<double> reals(const std::string& key, const json& values);
/// A number without a fraction.
int64_t whole(const std::string& key, const json& value);
std::vector<int64_t> wholes(const std::string& key, const json& values);
/// True or false, or 1 or 0.
bool flag(const std::string& key, const json& value);

}  // namespace posembed::configuration
