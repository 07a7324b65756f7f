// Validates UTF-8 by RFC 3629: rejects surrogates and overlong forms.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace posembed::pretrained {

/// The length of the character at the start of `bytes`, or 0 if there is none.
inline size_t utf8_character(std::string_view bytes) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(i < bytes.size() ? bytes[i] : 0); };
  const auto continues = [&](size_t i) { return (byte(i) & 0xc0u) == 0x80u; };
  const uint8_t first = byte(0), second = byte(1);
  if (first < 0x80) return 1;
  if (first < 0xc2 || first > 0xf4 || !continues(1)) return 0;
  if (first < 0xe0) return 2;
  if (first == 0xe0 && second < 0xa0) return 0;  // would fit in two bytes
  if (first == 0xed && second > 0x9f) return 0;  // surrogates
  if (first == 0xf0 && second < 0x90) return 0;  // would fit in three bytes
  if (first == 0xf4 && second > 0x8f) return 0;  // beyond U+10FFFF
  if (!continues(2)) return 0;
  if (first < 0xf0) return 3;
  return continues(3) ? 4 : 0;
}

/// The length of the longest prefix of `bytes` that is UTF-8.
inline size_t utf8_prefix(std::string_view bytes) {
  size_t at = 0;
  while (at < bytes.size()) {
    const size_t length = utf8_character(bytes.substr(at));
    if (length == 0) break;
    at += length;
  }
  return at;
}

/// The bytes with U+FFFD for each part that is not UTF-8, as in Python: a truncated character, or a
/// single byte.
inline std::string utf8_replaced(std::string_view bytes) {
  std::string text;
  while (true) {
    const size_t valid = utf8_prefix(bytes);
    text += bytes.substr(0, valid);
    bytes.remove_prefix(valid);
    if (bytes.empty()) return text;
    text += "\xef\xbf\xbd";
    size_t bad = std::min<size_t>(3, bytes.size());
    const auto begins_character = [&] {  // that two more bytes would complete
      return utf8_character(std::string(bytes.substr(0, bad)) + "\x80\x80") > bad;
    };
    while (bad > 1 && !begins_character()) --bad;
    bytes.remove_prefix(bad);
  }
}

}  // namespace posembed::pretrained
