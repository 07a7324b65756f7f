// The interface behind VectorFile, with one implementation for files of tensors and one for files
// of words. Readers throw BadFile; with_path() adds the file's name.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "posembed/pretrained.h"
#include "pretrained/bad_file.h"
#include "pretrained/file.h"
#include "pretrained/table_formats.h"

namespace posembed::pretrained {

/// Where a table lies in a file.
struct Place {
  std::shared_ptr<const File> file;
  int64_t begin = 0, rows = 0, columns = 0;
  torch::Dtype dtype = torch::kFloat;
};

/// A table that is not read, and the scales of its codes if its numbers are codes: in memory, or in
/// a file if each row has scales of its own.
struct StoredTable {
  Place table;
  std::optional<Place> scale_rows;  ///< [rows, blocks]
  torch::Tensor scales;             ///< [rows / block_rows, blocks], rounded up
  int64_t block_rows = 1, block_columns = 1;
};

class Source {
 public:
  virtual ~Source() = default;
  virtual const std::string& path() const = 0;
  virtual Format format() const = 0;
  virtual std::vector<std::string> names() const = 0;
  virtual std::vector<int64_t> shape(const std::string& name) const = 0;
  virtual torch::Dtype dtype(const std::string& name) const = 0;
  virtual torch::Tensor tensor(const std::string& name, torch::Dtype dtype,
                               const Progress& progress, bool to_copy) const = 0;
  virtual torch::Tensor table(const ReadOptions& options) const = 0;
  /// A table by its name; empty: the only one.
  virtual StoredTable stored(const std::string& tensor) const;
  /// The codes of a table by its name; empty: the only one. None for tables of numbers.
  virtual std::optional<StoredCodes> codes(const std::string&) const { return std::nullopt; }
  virtual std::vector<std::string> words() const = 0;
  virtual Skipped skipped() const { return {}; }
  /// Looks up the file's words.
  virtual void look_up(Vocabulary& vocabulary, const Progress& progress) const = 0;
  /// Looks up the file's words and copies their rows; the others are zeros.
  virtual torch::Tensor read_rows(Vocabulary& vocabulary, const ReadOptions& options) const = 0;
};

/// Calls `read`; turns BadFile into FileFormatError, whose message says what to do about a bad row.
template <typename Read>
auto with_path(const std::string& path, const Read& read) {
  try {
    return read();
  } catch (const BadRow& error) {
    const std::string reason = error.what();
    throw FileFormatError(path, error.offset, reason + " (on_bad_row 'skip' leaves such rows out)");
  } catch (const BadFile& error) {
    throw FileFormatError(path, error.offset, error.what());
  }
}

/// The file's format is recognised as by open().
POSEMBED_API std::shared_ptr<const Source> open_source(const std::string& path,
                                                       const OpenOptions& options);

std::shared_ptr<const Source> open_safetensors(const std::string& path, bool is_index,
                                               const OpenOptions& options);
std::shared_ptr<const Source> open_words(const std::string& path, const OpenOptions& options);

}  // namespace posembed::pretrained
