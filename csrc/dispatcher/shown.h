// Texts of the caller in messages.
#pragma once

#include <string>
#include <string_view>

namespace posembed::dispatcher {

/// A text, or the beginning of a long one: a message stays short.
inline std::string shown(std::string_view text, size_t most = 80) {
  if (text.size() <= most) return std::string(text);
  while (most > 0 && (text[most] & 0xC0) == 0x80) --most;  // not within a character of UTF-8
  return std::string(text.substr(0, most)) + "…";
}

}  // namespace posembed::dispatcher
