// Strict reading of a dictionary: unknown and missing keys throw, and so do strings in place of
// numbers. Everything here throws c10::ValueError, whose message begins with the key.
#pragma once

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "configuration/fields.h"

namespace posembed::configuration {

/// A dictionary whose keys are taken one by one; done() rejects those that remain.
class Keys {
 public:
  /// Keys that are null count as absent. `where` names the dictionary in messages.
  Keys(const Fields& fields, std::string where);

  /// The value of a key that may be absent.
  json take(const std::string& key, json otherwise = nullptr);
  /// The value of a key that must be present.
  json need(const std::string& key);
  /// Whether the key is present, even with null.
  bool has(const std::string& key) const { return names_.count(key) > 0; }
  /// The value of the first key that is present and not zero; null otherwise.
  json first(const std::vector<std::string>& keys);
  /// The value on which several keys agree; null if none is present.
  json same(const std::vector<std::string>& keys);
  /// Accepts keys that do not matter here.
  void ignore(const std::vector<std::string>& keys) { accepted_.insert(keys.begin(), keys.end()); }

  /// The keys that contain a word and were neither taken nor accepted.
  std::vector<std::string> left(const std::string& containing = "") const;
  /// Rejects keys that contain a word and were neither taken nor accepted.
  void done(const std::string& containing = "") const;

  /// All keys that are not null.
  const Fields& fields() const { return fields_; }
  const std::string& where() const { return where_; }

 private:
  std::set<std::string> names_;
  Fields fields_;
  std::string where_;
  std::set<std::string> accepted_;
};

/// Rejects anything but a dictionary.
void check_mapping(const json& value, const std::string& where);

/// The value on which several sources agree; null if none has one.
json same(const std::string& key, const std::vector<json>& values);

/// Rejects an argument that would have no effect.
void check_effect(const std::string& name, const json& value, const std::string& why);

/// Rejects anything but a number.
void check_number(const std::string& key, const json& value);
/// A number as a double.
double real(const std::string& key, const json& value);
/// The base of a geometric series: a finite number of at least 1.
double base_number(const std::string& key, const json& value);
/// The same; std::nullopt for null.
std::optional<double> optional_real(const std::string& key, const json& value);
/// A list of numbers.
std::vector<double> reals(const std::string& key, const json& values);
/// An integer.
int64_t whole(const std::string& key, const json& value);
std::vector<int64_t> wholes(const std::string& key, const json& values);
/// True or false, or 1 or 0.
bool flag(const std::string& key, const json& value);

}  // namespace posembed::configuration
