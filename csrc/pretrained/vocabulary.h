// Finds the rows of a file for the words of a vocabulary.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace posembed::pretrained {

/// The words asked for, met in a file's order.
class Vocabulary {
 public:
  /// Keeps a reference to `words`. An empty word marks a place without a word.
  explicit Vocabulary(const std::vector<std::string>& words) : words_(words), times_(words.size()) {
    places_.reserve(words.size());
    for (size_t i = 0; i < words.size(); ++i) {
      if (!words[i].empty()) places_.emplace(words[i], static_cast<int64_t>(i));
    }
  }

  int64_t size() const { return static_cast<int64_t>(words_.size()); }

  /// The first word that is given twice, or null.
  const std::string* repeated() const {
    for (size_t i = 0; i < words_.size(); ++i) {
      if (!words_[i].empty() && places_.at(words_[i]) != static_cast<int64_t>(i)) return &words_[i];
    }
    return nullptr;
  }

  /// The place of a word of the file; -1 if it is not wanted or was met before: the first row of a
  /// word counts, as in gensim.
  int64_t meet(std::string_view word) {
    const auto found = places_.find(word);
    if (found == places_.end()) return -1;
    uint8_t& times = times_[static_cast<size_t>(found->second)];
    if (times < 2) ++times;
    return times == 1 ? found->second : -1;
  }

  bool is_met(int64_t place) const { return times_[static_cast<size_t>(place)] > 0; }

  /// Words met that many times (0, 1, or 2 for more), in the vocabulary's order.
  std::vector<std::string> met(uint8_t times) const {
    std::vector<std::string> result;
    for (size_t i = 0; i < words_.size(); ++i) {
      if (times_[i] == times && !words_[i].empty()) result.push_back(words_[i]);
    }
    return result;
  }

  int64_t count_met() const {
    int64_t count = 0;
    for (const uint8_t times : times_) count += times > 0;
    return count;
  }

 private:
  const std::vector<std::string>& words_;
  std::vector<uint8_t> times_;
  std::unordered_map<std::string_view, int64_t> places_;
};

}  // namespace posembed::pretrained
