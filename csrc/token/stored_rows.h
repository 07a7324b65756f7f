// Rows that are read from files one by one, and threads that ask the system for them ahead.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/index.h"
#include "pretrained/source.h"

namespace posembed::token {

/// A table of which each part lies in a file.
class StoredRows {
 public:
  /// Parts in the order of their rows, with the same columns and dtype.
  explicit StoredRows(const std::vector<pretrained::Place>& parts);

  int64_t rows() const { return rows_; }
  int64_t columns() const { return parts_[0].columns; }
  torch::Dtype dtype() const { return parts_[0].dtype; }
  int64_t row_bytes() const { return row_bytes_; }

  /// Copies the rows of ids [begin, end), which must have been checked, to their places in `out`.
  /// Returns how many had to be fetched.
  /// Throws FileFormatError if a file has become shorter.
  int64_t read(core::IndexView ids, int64_t begin, int64_t end, char* out) const;

  /// The same bytes, where each row is `parts` rows.
  StoredRows split(int64_t parts) const;

  /// Copies all rows.
  void read_all(char* out) const;

  /// Asks the system for the rows of ids, without waiting for them.
  void prefetch(core::IndexView ids, int64_t count) const;

 private:
  struct Row {
    const pretrained::File* file;
    int64_t begin;
  };

  Row find(int64_t id) const;

  std::vector<pretrained::Place> parts_;
  std::vector<int64_t> ends_;  // of the parts: the row after the last
  int64_t rows_ = 0, row_bytes_ = 0;
};

}  // namespace posembed::token
