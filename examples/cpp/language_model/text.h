// Real text as one tensor of byte ids, and windows over it without a copy.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace language_model {

/// The first `size` bytes of a folder's .py files in the order of their names: int64 [size],
/// 0..255.
inline at::Tensor read_bytes(const std::filesystem::path& folder, int64_t size) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.is_regular_file() && entry.path().extension() == ".py") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());

  std::string text;
  for (const auto& file : files) {
    std::ifstream stream(file, std::ios::binary);
    text.append(std::istreambuf_iterator<char>(stream), {});
    if (static_cast<int64_t>(text.size()) >= size) break;
  }
  if (static_cast<int64_t>(text.size()) < size) {
    throw std::runtime_error(folder.string() + ": expected " + std::to_string(size) +
                             " bytes of .py files, found " + std::to_string(text.size()));
  }
  return at::from_blob(text.data(), {size}, at::kByte).to(at::kLong);
}

/// Inputs and the bytes that follow them, int64 [count, length] each: views of `ids`, one byte
/// apart.
inline std::pair<at::Tensor, at::Tensor> windows(const at::Tensor& ids, int64_t length) {
  const int64_t used = (ids.size(0) - 1) / length * length;
  return {ids.narrow(0, 0, used).unfold(0, length, length),
          ids.narrow(0, 1, used).unfold(0, length, length)};
}

}  // namespace language_model
