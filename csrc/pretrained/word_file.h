// Reads files of word vectors row by row without copies: word2vec binary and text, fastText .vec
// (word2vec text), GloVe text (the same without a header). Mikolov et al., arXiv:1301.3781;
// Pennington et al., "GloVe", 2014; Bojanowski et al., arXiv:1607.04606.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "core/scalar.h"

namespace posembed::pretrained {

/// The format of a file, from its first bytes.
struct WordLayout {
  bool binary = false;  ///< float32 numbers instead of text
  int64_t rows = -1;    ///< -1: unknown, without a header
  int64_t dim = 0;      ///< numbers in a row
  int64_t begin = 0;    ///< offset of the first row
  bool tabbed = false;  ///< a TAB ends the word, whatever the word is made of
};

/// The layout of a file of `size` bytes, from its first `layout_bytes`. Throws BadFile for an
/// unknown format, and if the file is too short for its header.
WordLayout detect_layout(std::string_view head, int64_t size);

/// The maximum length in bytes of a line of text, or of a binary row's word; a longer one means
/// that the file has another format.
constexpr int64_t max_line = 1 << 22;
constexpr int64_t layout_bytes = max_line + 128;  // and a header

/// Makes a file's bytes up to `end` readable.
using Load = std::function<void(int64_t end)>;

/// A row as stored in the file.
struct Row {
  std::string_view word;
  std::string_view numbers;
  int64_t number = 0;  ///< in the file, from 1
};

/// Iterates over the rows of a file. Where the first row has a TAB after its word, the first TAB of
/// each row ends the word ("apollo 11"). Otherwise, a text row's numbers are its last `dim` parts,
/// and the rest is the word. It may contain spaces ("new york"), but the part after its last space
/// must not be a number: such a row is too wide.
class RowReader {
 public:
  /// `check_utf8`: throw BadRow for a word that is not UTF-8; otherwise replace its invalid bytes
  /// with U+FFFD. `load`: called before bytes of `file` are read, in the file's order.
  RowReader(std::string_view file, const WordLayout& layout, bool check_utf8, Load load)
      : file_(file),
        layout_(layout),
        check_utf8_(check_utf8),
        load_(std::move(load)),
        at_(layout.begin) {}

  /// The next row, or false at the end; its word is valid until the next call. Throws BadRow for a
  /// row that does not have `dim` numbers; the next call continues after it. Throws BadFile for
  /// more or fewer rows than the header says.
  bool next(Row& row);

  /// The number of the last row, from 1.
  int64_t row() const { return rows_read_; }

  /// The offset of the last row.
  int64_t begin() const { return begin_; }

  /// The beginning of the last row, for a message.
  std::string_view first_word() const;

  /// The offset of the next row.
  int64_t position() const { return at_; }

  /// Writes a row's numbers as `dim` values of type `scalar`; may be called from several threads.
  /// Throws BadRow if one is not a finite number of float32 (float64, if `scalar` is), and BadFile
  /// if such a number is not finite in a narrower `scalar`.
  void decode(const Row& row, core::Scalar scalar, void* out) const;

 private:
  std::string_view loaded() const { return file_.substr(0, static_cast<size_t>(loaded_)); }
  void load_to(int64_t end);
  /// The position where a search of loaded(), from a given position, finds something; npos at the
  /// end of the file.
  template <typename Search>
  size_t find(int64_t begin, const Search& search);
  bool at_end();
  void next_binary(Row& row);
  void next_text(Row& row);
  /// The begin and end of a line's word. Throws BadRow if the line does not have `dim` numbers.
  std::pair<size_t, size_t> word_before_tab(std::string_view line) const;
  std::pair<size_t, size_t> word_in(std::string_view line) const;
  [[noreturn]] void refuse_width(int64_t numbers) const;
  template <typename Error, typename Number>
  [[noreturn]] void refuse_range(const Row& row, std::string_view text, int64_t index,
                                 const Number& number, core::Scalar scalar) const;
  int64_t offset(std::string_view part) const { return part.data() - file_.data(); }
  template <typename Number, typename T>
  void parse(const Row& row, core::Scalar scalar, T* out) const;
  template <typename Number, typename T>
  void convert(const Row& row, core::Scalar scalar, T* out) const;

  std::string_view file_;
  WordLayout layout_;
  bool check_utf8_;
  Load load_;
  int64_t loaded_ = 0;
  int64_t at_;
  int64_t begin_ = 0;  // of the last row
  int64_t rows_read_ = 0;
  std::string replaced_;  // a word with U+FFFD
};

}  // namespace posembed::pretrained
