// Limits the nesting of JSON: nlohmann::json prints, copies and compares nested values recursively,
// so deep nesting would exhaust the stack.
#pragma once

#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "core/brief.h"

namespace posembed::dispatcher {

/// Raises ValueError at a level that no configuration or specification has.
inline void check_json_depth(const char* name, int depth) {
  constexpr int max_depth = 64;
  TORCH_CHECK_VALUE(depth <= max_depth, name, ": expected JSON of at most ", max_depth, " levels");
}

/// What is wrong with a text, in short: nlohmann repeats a number in full. Without its end "last
/// read", which may hold part of a character.
inline std::string reason(const nlohmann::json::exception& error) {
  const std::string_view text = error.what();
  return core::brief(text.substr(0, text.find("; last read")));
}

inline nlohmann::json parse_json(const char* name, const std::string& text) {
  return nlohmann::json::parse(text, [name](int depth, nlohmann::json::parse_event_t, auto&) {
    check_json_depth(name, depth);
    return true;
  });
}

}  // namespace posembed::dispatcher
