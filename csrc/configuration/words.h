// Tables of names: hundreds of names are easier to read without quotes and commas.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace posembed::configuration {

/// The words of a text, separated by spaces and line ends.
class Words {
 public:
  constexpr Words(const char* text) : text_(text) {}

  std::vector<std::string> list() const {
    std::vector<std::string> words;
    visit([&](std::string_view word) {
      words.emplace_back(word);
      return false;
    });
    return words;
  }

  bool has(std::string_view word) const {
    return visit([&](std::string_view each) { return each == word; });
  }

 private:
  /// Calls `found` with each word until it returns true; returns whether it did.
  template <typename Found>
  bool visit(const Found& found) const {
    constexpr const char* blanks = " \n";
    size_t begin = text_.find_first_not_of(blanks);
    while (begin != std::string_view::npos) {
      const size_t end = std::min(text_.find_first_of(blanks, begin), text_.size());
      if (found(text_.substr(begin, end - begin))) return true;
      begin = text_.find_first_not_of(blanks, end);
    }
    return false;
  }

  std::string_view text_;
};

/// The row of a table that has a name among its words, or null.
template <typename Row, size_t length>
const Row* row_of(const Row (&rows)[length], std::string_view name) {
  const Row* row =
      std::find_if(rows, rows + length, [&](const Row& each) { return each.names.has(name); });
  return row == rows + length ? nullptr : row;
}

}  // namespace posembed::configuration
