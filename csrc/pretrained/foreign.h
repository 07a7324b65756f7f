// Recognises other formats by their first bytes, so that an error can say what a file is and what
// to do.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>

#include "pretrained/bad_file.h"

namespace posembed::pretrained {

/// Whether a file is an HTML page, such as an error page that a download saved.
inline bool is_html(std::string_view file) {
  const size_t begin = std::min(file.find_first_not_of("\xef\xbb\xbf \t\r\n"), file.size());
  std::string head(file.substr(begin, 9));
  std::transform(head.begin(), head.end(), head.begin(),
                 [](char c) { return 'A' <= c && c <= 'Z' ? static_cast<char>(c + 32) : c; });
  return head == "<!doctype" || head.substr(0, 5) == "<html" || head.substr(0, 5) == "<?xml";
}

/// Throws BadFile if the first bytes are those of another format.
inline void refuse_foreign(std::string_view file) {
  struct Signature {
    std::string_view bytes;
    const char* what;
  };
  constexpr Signature foreign[] = {
      {"\x1f\x8b", "a gzip archive: unpack it first"},
      {std::string_view("\xfd"
                        "7zXZ\0",
                        6),
       "an xz archive: unpack it first"},
      {"BZh", "a bzip2 archive: unpack it first"},
      {"\x28\xb5\x2f\xfd", "a Zstandard archive: unpack it first"},
      {"7z\xbc\xaf\x27\x1c", "a 7-Zip archive: unpack it first"},
      {"PK\x03\x04",
       "a zip archive: unpack GloVe's download, or read a torch.save file by torch.load"},
      {"\x80\x02", "a pickle, which is not read because it can run code"},
      {"\x80\x04", "a pickle, which is not read because it can run code"},
      {"\x80\x05", "a pickle, which is not read because it can run code"},
      {"\x93NUMPY", "a NumPy array: read it with numpy.load"},
      {"\x89HDF\r\n\x1a\n", "an HDF5 file, which is not read"},
      {"PAR1", "a Parquet file, which is not read"},
      {"GGUF", "a GGUF model; Python's TokenEmbedding.from_file reads its token table"},
      {"version https://git-lfs", "a Git LFS pointer and not the file: run git lfs pull"},
      {"\xba\x16\x4f\x2f", "a fastText model: use its .vec file"},
  };
  if (is_html(file)) fail(0, "a web page and not the file: the download has gone wrong");
  for (const Signature& signature : foreign) {
    if (file.substr(0, signature.bytes.size()) == signature.bytes) fail(0, signature.what);
  }
}

}  // namespace posembed::pretrained
