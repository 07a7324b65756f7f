// The words whose rows to read from a file of vectors.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "posembed/export.h"

namespace posembed::pretrained {

/// Requested words, marked when they are met in a file: see VectorFile::rows. Stores all words in
/// one string and finds them with a hash table of 32-bit numbers, so that millions of words take
/// little memory.
///
///     posembed::pretrained::Vocabulary vocabulary;
///     vocabulary.add("king");
///     vocabulary.add("queen");
///     const torch::Tensor vectors = file.rows(vocabulary);   // vocabulary.is_met(0), ...
class Vocabulary {
 public:
  /// Reserves room for `words` words of `bytes` bytes in all; unused room takes no memory.
  explicit Vocabulary(size_t words = 0, size_t bytes = 0) {
    ends_.reserve(words);
    text_.reserve(bytes);
  }

  explicit Vocabulary(const std::vector<std::string>& words)
      : Vocabulary(words.size(), bytes_of(words)) {
    for (const std::string& word : words) add(word);
  }

  /// Appends a word; an empty one stands for a row without a word.
  void add(std::string_view word) {
    TORCH_CHECK_VALUE(word.size() <= max_bytes - text_.size() && ends_.size() < max_bytes / 2,
                      "vocabulary: expected words of at most ", max_bytes, " bytes in all");
    text_ += word;
    ends_.push_back(static_cast<uint32_t>(text_.size()));
  }

  /// Prepares meet(); call it after the last add().
  /// @throws c10::ValueError a word is given twice
  void index() {
    times_.assign(ends_.size(), 0);
    slots_.assign(ends_.size() + ends_.size() / 2 + 1, 0);
    tags_.assign(slots_.size(), 0);
    for (size_t i = 0; i < ends_.size(); ++i) {
      if (word(i).empty()) continue;
      const uint64_t hash = hash_of(word(i));
      const size_t slot = find(word(i), hash);
      if (tags_[slot] != 0) refuse_twice(word(i));
      tags_[slot] = tag_of(hash);
      slots_[slot] = static_cast<uint32_t>(i);
    }
  }

  int64_t size() const { return static_cast<int64_t>(ends_.size()); }

  /// The index of a word from the file; -1 if it is not requested or was met before, because the
  /// first row of a word counts, as in gensim. Finds no word before index() is called.
  int64_t meet(std::string_view word) {
    if (tags_.empty()) return -1;
    const size_t slot = find(word, hash_of(word));
    if (tags_[slot] == 0) return -1;
    uint8_t& times = times_[slots_[slot]];
    if (times < 2) ++times;
    return times == 1 ? int64_t{slots_[slot]} : -1;
  }

  bool is_met(int64_t index) const {
    return 0 <= index && index < static_cast<int64_t>(times_.size()) &&
           times_[static_cast<size_t>(index)] > 0;
  }

  /// Calls `visit` with each word that was met `times` times (2: more than once), in the
  /// vocabulary's order.
  template <typename Visit>
  void visit_met(uint8_t times, const Visit& visit) const {
    for (size_t i = 0; i < times_.size(); ++i) {
      if (times_[i] == times && !word(i).empty()) visit(word(i));
    }
  }

  int64_t count_met() const {
    int64_t count = 0;
    for (const uint8_t times : times_) count += times > 0;
    return count;
  }

 private:
  /// Indices and bytes are counted in 32 bits.
  static constexpr size_t max_bytes = std::numeric_limits<uint32_t>::max();

  [[noreturn]] POSEMBED_API static void refuse_twice(std::string_view word);

  static size_t bytes_of(const std::vector<std::string>& words) {
    size_t bytes = 0;
    for (const std::string& word : words) bytes += word.size();
    return bytes;
  }

  static uint64_t hash_of(std::string_view word) { return std::hash<std::string_view>{}(word); }

  /// A few bits of the hash, so that different words are seldom compared. 0 marks a free slot.
  static uint8_t tag_of(uint64_t hash) { return static_cast<uint8_t>(hash | 1); }

  std::string_view word(size_t i) const {
    const size_t begin = i == 0 ? 0 : ends_[i - 1];
    return std::string_view(text_).substr(begin, ends_[i] - begin);
  }

  /// The slot of the word, or the free slot where it belongs.
  size_t find(std::string_view wanted, uint64_t hash) const {
    size_t slot = (hash >> 32) * slots_.size() >> 32;  // the high bits choose without a division
    while (tags_[slot] != 0 && (tags_[slot] != tag_of(hash) || word(slots_[slot]) != wanted)) {
      slot = slot + 1 < slots_.size() ? slot + 1 : 0;
    }
    return slot;
  }

  std::string text_;
  std::vector<uint32_t> ends_;  // of words in the text
  std::vector<uint8_t> times_;
  std::vector<uint32_t> slots_;  // open addressing, to 2/3 full
  std::vector<uint8_t> tags_;
};

}  // namespace posembed::pretrained
