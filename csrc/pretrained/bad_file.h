// The exceptions that readers throw. They lack the file's path, which only the caller knows.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

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

/// Throws BadFile, or a type derived from it, with the concatenated parts.
template <typename Error = BadFile, typename... Parts>
[[noreturn]] void fail(int64_t offset, const Parts&... parts) {
  std::ostringstream reason;
  (reason << ... << parts);
  throw Error(offset, readable(reason.str()));
}

}  // namespace posembed::pretrained
