// Shortens text for messages: names and values come from files and callers, and may have any
// length.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace posembed::core {

/// The text, or its head and its tail around "..." if it is longer than `most` bytes. Cuts UTF-8
/// only between characters.
inline std::string brief(std::string_view text, size_t most = 200) {
  if (text.size() <= most) return std::string(text);
  const auto is_inside = [&](size_t at) {
    return (static_cast<unsigned char>(text[at]) & 0xc0u) == 0x80u;
  };
  size_t head = most * 2 / 3, tail = text.size() - most / 3 + 3;
  while (head > 0 && is_inside(head)) --head;
  while (tail < text.size() && is_inside(tail)) ++tail;
  return std::string(text.substr(0, head)).append("...").append(text.substr(tail));
}

}  // namespace posembed::core
