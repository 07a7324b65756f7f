// Recognises other formats by their first bytes and tells how to convert them.
#pragma once

#include <string_view>

#include "pretrained/bad_file.h"

namespace posembed::pretrained {

/// Throws BadFile if the first bytes are those of another format.
inline void refuse_foreign(std::string_view file) {
  struct Signature {
    std::string_view bytes;
    const char* what;
  };
  constexpr Signature foreign[] = {
      {"\x1f\x8b", "a gzip archive: unpack it first"},
      {"PK\x03\x04", "a zip archive (GloVe's download or a torch.save file): unpack it first"},
      {"\x80\x02", "a pickle, which is not read because it can run code"},
      {"\x80\x04", "a pickle, which is not read because it can run code"},
      {"\x80\x05", "a pickle, which is not read because it can run code"},
      {"\x93NUMPY", "a NumPy array: read it with numpy.load"},
      {"GGUF", "a GGUF model, which is not read"},
      {"version https://git-lfs", "a Git LFS pointer and not the file: run git lfs pull"},
      {"\xba\x16\x4f\x2f", "a fastText model: use its .vec file"},
  };
  for (const Signature& signature : foreign) {
    if (file.substr(0, signature.bytes.size()) == signature.bytes) fail(0, signature.what);
  }
}

}  // namespace posembed::pretrained
