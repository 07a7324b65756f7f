// Fuzzes the header of safetensors: accepted tensors must lie within the file, and fill it.
#include <algorithm>

#include "answer.h"
#include "budget.h"
#include "mutator.h"
#include "pretrained/file.h"

using namespace posembed;

namespace {

void read(std::string_view file) {
  const auto size = static_cast<int64_t>(file.size());
  const int64_t end = pretrained::header_end(file.substr(0, pretrained::recognised_bytes), size);
  int64_t bytes = end;
  for (const pretrained::TensorEntry& entry : pretrained::read_header(file.substr(0, static_cast<size_t>(end)), size)) {
    fuzz::require(entry.begin >= end && entry.size >= 0 && entry.begin <= size - entry.size);
    const bool is_empty = std::count(entry.shape.begin(), entry.shape.end(), 0) > 0;
    fuzz::require(!is_empty || entry.size == 0);
    bytes += entry.size;
  }
  fuzz::require(bytes == size);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const fuzz::Budget budget(size);
  fuzz::answer(size, [&] { read(fuzz::text_of(data, size)); });
  return 0;
}

/// Most files keep the correct length of their header, so that mutations reach what follows it.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
  constexpr size_t length_bytes = 8;
  if (size <= length_bytes || seed % 8 == 1) return LLVMFuzzerMutate(data, size, max_size);
  size = length_bytes + fuzz::mutate(data + length_bytes, size - length_bytes, max_size - length_bytes, seed);
  const size_t brace = fuzz::text_of(data, size).rfind('}');
  if (brace == std::string_view::npos || brace < length_bytes) return size;
  const uint64_t length = brace + 1 - length_bytes;
  std::memcpy(data, &length, sizeof length);
  return size;
}
