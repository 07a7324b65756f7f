// Specifications as JSON. Each lists its fields once: fields(visit, object) calls visit(key, field,
// rules…) for every field, and serves the writer, the reader and its messages.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/brief.h"
#include "dispatcher/json.h"
#include "dispatcher/operator.h"

namespace posembed::dispatcher {

// Fields of structs and of variants overload json_of() and read_json() in namespace posembed.

// ----------------------------------------------------------------------------------------- writing

template <typename T>
nlohmann::json json_of(const T& field) {
  if constexpr (std::is_enum_v<T>) {
    return name(field);
  } else {
    return field;
  }
}

template <typename T>
nlohmann::json json_of(const std::optional<T>& field) {
  return field.has_value() ? json_of(*field) : nlohmann::json();
}

struct FieldWriter {
  nlohmann::json object = nlohmann::json::object();

  template <typename T, typename... Rules>
  void operator()(const char* key, const T& field, const Rules&...) {
    object[key] = json_of(field);
  }
};

/// The JSON object of a struct. Takes a copy, because fields() visits mutable fields.
template <typename T>
nlohmann::json written(T object) {
  FieldWriter writer;
  fields(writer, object);
  return std::move(writer.object);
}

// ----------------------------------------------------------------------------------------- reading

template <typename T>
void read_json(const nlohmann::json& from, T& field) {
  if constexpr (std::is_enum_v<T>) {
    field = enum_from<T>(from.get<std::string>());
  } else {
    from.get_to(field);
  }
}

inline void read_json(const nlohmann::json& from, int64_t& field) {
  // get_to() alone would truncate fractions.
  if (!from.is_number_integer()) {
    throw nlohmann::json::type_error::create(302, "no whole number", &from);
  }
  from.get_to(field);
}

inline void read_json(const nlohmann::json& from, std::vector<int64_t>& field) {
  for (const auto& each : from.get_ref<const nlohmann::json::array_t&>()) {
    read_json(each, field.emplace_back());
  }
}

template <typename T>
void read_json(const nlohmann::json& from, std::optional<T>& field) {
  field = std::nullopt;
  if (!from.is_null()) read_json(from, field.emplace());
}

/// What a message says that a field is.
template <typename T>
const char* kind_of(const T&) {
  if (std::is_same_v<T, bool>) return "true or false";
  if (std::is_same_v<T, int64_t>) return "a whole number";
  if (std::is_same_v<T, double>) return "a number";
  if (std::is_same_v<T, std::vector<int64_t>>) return "whole numbers";
  if (std::is_same_v<T, std::vector<double>>) return "numbers";
  return std::is_enum_v<T> || std::is_same_v<T, std::string> ? "a text" : "an object";
}

template <typename T>
const char* kind_of(const std::optional<T>&) {
  return kind_of(T());
}

/// Removes keys as they are read; done() throws c10::ValueError if any are left.
class FieldReader {
 public:
  /// @param what  the object's name in messages
  FieldReader(const char* what, nlohmann::json object) : what_(what), object_(std::move(object)) {
    TORCH_CHECK_VALUE(object_.is_object(), what, ": expected a JSON object, got ",
                      core::brief(object_.dump()));
  }

  /// A field without a key does not change.
  template <typename T, typename... Rules>
  void operator()(const char* key, T& field, const Rules&...) {
    known_ += known_.empty() ? key : std::string(", ") + key;
    if (!object_.contains(key)) return;
    try {
      read_json(object_.at(key), field);
    } catch (const nlohmann::json::exception&) {
      TORCH_CHECK_VALUE(false, what_, ": ", key, ": expected ", kind_of(field), ", got ",
                        core::brief(object_.at(key).dump()));
    }
    object_.erase(key);
  }

  void done() const {
    for (const auto& left : object_.items()) {
      TORCH_CHECK_VALUE(false, what_, ": unknown key '", core::brief(left.key()),
                        "'; known are: ", known_);
    }
  }

 private:
  const char* what_;
  nlohmann::json object_;
  std::string known_;
};

template <typename T>
void read_fields(const char* what, nlohmann::json from, T& object) {
  FieldReader reader(what, std::move(from));
  fields(reader, object);
  reader.done();
}

/// read(object) for the JSON of a specification's text. Throws c10::ValueError for other text.
template <typename Read>
auto read_text(const char* what, const std::string& text, const Read& read) {
  try {
    return read(parse_json(what, text));
  } catch (const nlohmann::json::exception& error) {
    TORCH_CHECK_VALUE(false, what, ": expected JSON text of a specification, got '",
                      core::brief(text), "': ", reason(error));
  }
}

}  // namespace posembed::dispatcher
