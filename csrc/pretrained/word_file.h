// Reads files of word vectors row by row without copies: word2vec binary and text, fastText .vec
// (word2vec text), GloVe text (the same without a header). Mikolov et al., arXiv:1301.3781;
// Pennington et al., "GloVe", 2014; Bojanowski et al., arXiv:1607.04606.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/scalar.h"

namespace posembed::pretrained {

/// The format of a file, from its first bytes.
struct WordLayout {
  bool binary = false;  ///< float32 numbers instead of text
  int64_t rows = -1;    ///< -1: unknown, without a header
  int64_t dim = 0;      ///< numbers in a row
  int64_t begin = 0;    ///< offset of the first row
};

/// Throws BadFile for an unknown format, and if the file is too short for its header.
WordLayout detect_layout(std::string_view file);

/// A row as stored in the file.
struct Row {
  std::string_view word;
  std::string_view numbers;
};

/// Iterates over the rows of a file. In text, a row's last `dim` parts are its numbers and the rest
/// is its word. A word may contain spaces ("new york"), but its last part must not be a number:
/// such a row is too wide.
class RowReader {
 public:
  /// `check_utf8`: throw BadFile for a word that is not UTF-8; otherwise replace its bad bytes with
  /// U+FFFD.
  RowReader(std::string_view file, const WordLayout& layout, bool check_utf8)
      : file_(file), layout_(layout), check_utf8_(check_utf8), at_(layout.begin) {}

  /// The next row, or false at the end; its word is valid until the next call. Throws BadFile for a
  /// row that is not `dim` numbers wide, and for more or fewer rows than the header says.
  bool next(Row& row);

  /// The offset of the next row.
  int64_t position() const { return at_; }

  /// Writes a row's numbers as `dim` values of type `scalar`; may be called from several threads.
  /// Throws BadFile for text that is no finite number.
  void decode(const Row& row, core::Scalar scalar, void* out) const;

 private:
  bool at_end();
  void next_binary(Row& row);
  void next_text(Row& row);
  int64_t offset(std::string_view part) const { return part.data() - file_.data(); }
  template <typename Number, typename T>
  void parse(std::string_view numbers, T* out) const;

  std::string_view file_;
  WordLayout layout_;
  bool check_utf8_;
  int64_t at_;
  int64_t rows_read_ = 0;
  std::string replaced_;  // a word with U+FFFD
};

}  // namespace posembed::pretrained
