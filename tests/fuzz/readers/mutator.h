// Mutations that are likely to break readers: libFuzzer's own, and replacing numbers in the text by
// numbers at the limits of integers and of the file. Blind mutation does not find a shape whose
// product overflows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace posembed::fuzz {

inline std::string_view text_of(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

/// The runs of digits in a text: where they begin, and their length.
inline std::vector<std::pair<size_t, size_t>> numbers_in(std::string_view text) {
  constexpr std::string_view digits = "0123456789";
  std::vector<std::pair<size_t, size_t>> found;
  size_t begin = text.find_first_of(digits);
  while (begin != std::string_view::npos) {
    const size_t end = std::min(text.find_first_not_of(digits, begin), text.size());
    found.emplace_back(begin, end - begin);
    begin = text.find_first_of(digits, end);
  }
  return found;
}

/// A number at a limit of integers or of the file's size, or next to one.
inline std::string number_at_a_limit(std::minstd_rand& random, size_t file_size) {
  const int64_t limits[] = {0,
                            1,
                            16,
                            255,
                            int64_t{1} << 16,
                            int64_t{1} << 31,
                            int64_t{1} << 32,
                            int64_t{1} << 61,
                            int64_t{1} << 62,
                            static_cast<int64_t>(file_size)};
  const uint64_t number = static_cast<uint64_t>(limits[random() % std::size(limits)]);
  if (random() % 16 == 0) return std::to_string(uint64_t{0} - number);  // up to 2^64 - 1
  return std::to_string(number + random() % 3 - (number > 0 ? 1 : 0));
}

/// Replaces a number of the text, if it has one and the result fits.
inline size_t replace_number(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
  std::minstd_rand random(seed);
  const auto numbers = numbers_in(text_of(data, size));
  if (numbers.empty()) return LLVMFuzzerMutate(data, size, max_size);
  const auto [begin, length] = numbers[random() % numbers.size()];
  std::string text(text_of(data, size));
  text.replace(begin, length, number_at_a_limit(random, size));
  if (text.size() > max_size) return LLVMFuzzerMutate(data, size, max_size);
  std::memcpy(data, text.data(), text.size());
  return text.size();
}

/// One mutation in three replaces a number.
inline size_t mutate(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
  if (seed % 3 == 0) return replace_number(data, size, max_size, seed);
  return LLVMFuzzerMutate(data, size, max_size);
}

/// Aborts, which libFuzzer reports with the input, if a reader has accepted bad input.
inline void require(bool holds) {
  if (!holds) __builtin_trap();
}

}  // namespace posembed::fuzz
