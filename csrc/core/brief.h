// Shortens text for messages: names and values come from files and callers, and may have any
// length.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace posembed::core {

/// The text, or its head and its tail around "..." if it is longer than `max_size` bytes. Cuts
/// UTF-8 only between characters.
inline std::string brief(std::string_view text, size_t max_size = 200) {
  if (text.size() <= max_size) return std::string(text);
  const auto is_inside = [&](size_t at) {
    return (static_cast<unsigned char>(text[at]) & 0xc0u) == 0x80u;
  };
  size_t head = max_size * 2 / 3, tail = text.size() - max_size / 3 + 3;
  while (head > 0 && is_inside(head)) --head;
  while (tail < text.size() && is_inside(tail)) ++tail;
  return std::string(text.substr(0, head)).append("...").append(text.substr(tail));
}

}  // namespace posembed::core
