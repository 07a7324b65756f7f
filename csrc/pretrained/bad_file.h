// The exceptions that readers throw. They lack the file's path, which only the caller knows.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

#include "core/brief.h"
#include "pretrained/utf8.h"

namespace posembed::pretrained {

/// A malformed file: the byte at which the fault was found, and the reason.
struct BadFile : std::runtime_error {
  BadFile(int64_t offset, const std::string& reason) : std::runtime_error(reason), offset(offset) {}
  int64_t offset;
};

/// A row that cannot be read, although the file's other rows can.
struct BadRow : BadFile {
  using BadFile::BadFile;
};

/// Text of a file for a message: control characters and bytes that are not UTF-8 become question
/// marks.
inline std::string readable(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < ' ') c = '?';
  }
  for (size_t at = utf8_prefix(text); at < text.size();) {
    text[at] = '?';
    at += utf8_prefix(std::string_view(text).substr(at));
  }
  return text;
}

/// A name from a file or a caller, for a message: readable, short and quoted.
inline std::string in_quotes(std::string_view name) {
  return "'" + readable(core::brief(name)) + "'";
}

/// A part of a message. Texts of run time may come from the file and are shortened.
template <typename Part>
decltype(auto) part_of_message(const Part& part) {
  if constexpr (std::is_same_v<Part, std::string> || std::is_same_v<Part, std::string_view>) {
    return core::brief(part);
  } else {
    return (part);
  }
}

/// Throws BadFile, or a type derived from it, with the concatenated parts.
template <typename Error = BadFile, typename... Parts>
[[noreturn]] void fail(int64_t offset, const Parts&... parts) {
  std::ostringstream reason;
  (reason << ... << part_of_message(parts));
  throw Error(offset, readable(reason.str()));
}

}  // namespace posembed::pretrained
