// The safetensors format: the length of a JSON header in eight bytes, the header, then the tensors'
// bytes without gaps. https://github.com/huggingface/safetensors
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace posembed::pretrained {

/// A tensor as the header describes it, checked against the file.
struct TensorEntry {
  std::string name;
  std::string dtype;  ///< in the format's words: "F32", "BF16", ...
  std::vector<int64_t> shape;
  int64_t begin;        ///< of its data, in the file
  int64_t size;         ///< of its data, in bytes
  int64_t byte_offset;  ///< of its name's end in the file, for messages
};

/// A tensor's name and the file that contains it.
struct ShardEntry {
  std::string name;
  std::string file;
  int64_t byte_offset;  ///< in the index, for messages
};

/// Whether `head`, the first bytes of a file of `size` bytes, are those of a safetensors file.
bool is_safetensors(std::string_view head, int64_t size);

/// The end of the header, from the first `recognised_bytes` of a file. Throws BadFile.
int64_t header_end(std::string_view head, int64_t size);
constexpr int64_t recognised_bytes = 4096;

/// The tensors of a file of `size` bytes, in the header's order; `head` are its bytes up to
/// header_end(). Throws BadFile.
std::vector<TensorEntry> read_header(std::string_view head, int64_t size);

/// A text of the header's metadata; empty: it has none of this name. Throws BadFile.
std::string read_metadata(std::string_view head, const std::string& name);

/// The tensors of a sharded model, from its model.safetensors.index.json. Throws BadFile.
std::vector<ShardEntry> read_index(std::string_view file);

/// The maximum size in bytes of a header, set by the format, and of an index.
constexpr int64_t max_header = 100'000'000;

}  // namespace posembed::pretrained
