// The interface behind VectorFile, with one implementation for files of tensors and one for files
// of words, and what both need to make a table. Readers throw BadFile; with_path() adds the file's
// name.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "posembed/export.h"
#include "posembed/pretrained.h"
#include "pretrained/file.h"

namespace posembed::pretrained {

// ----------------------------------------------------------------------------------- table formats
// Which tensors of a file are one table of codes, as table_formats.json says of each program's
// format. What codes need is never taken for a table itself.

/// A row of table_formats.json: the ends of tensors' names by what they hold.
struct TableFormat {
  using Ends = std::map<std::string, std::vector<std::string>>;

  std::string name;
  std::string codes;
  std::vector<std::string> dtypes;
  Ends needs, may;
  std::string read;  ///< "rows": here; another: by Python; empty: by none
};

/// A table of codes and the names of the tensors that it needs: "scales", "zeros", ...
struct CodedTable {
  const TableFormat* format = nullptr;  ///< null: the numbers are no codes
  std::string module;                   ///< what the names have in common
  std::map<std::string, std::string> parts;
};

/// The entry of a tensor of the file, if it has one of that name.
using EntryOf = std::function<std::optional<TensorEntry>(const std::string&)>;

/// The format of a table, with the tensors beside it.
CodedTable coded_table(const TensorEntry& table, const EntryOf& entry_of);

/// The codes that need this tensor, if any do.
std::optional<std::string> codes_that_need(const std::string& name, const EntryOf& entry_of);

/// The codes of a module, or of its weight, that a caller names as if it were not quantised; empty:
/// none.
std::string codes_of_module(const std::string& name, const EntryOf& entry_of);

/// Whether a name is that of scales or zero points, whatever format they belong to.
bool is_named_as_part(const std::string& name);

/// A table of codes in a file, for those who turn its codes into numbers.
struct StoredCodes {
  std::string format, read, table;
  std::map<std::string, std::string> parts;
  std::string metadata;  ///< what safetensors say of the module's weight; empty: nothing
};

/// The text of table_formats.json.
const char* table_formats_text();

// ------------------------------------------------------------------------------------------ source

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
std::shared_ptr<const Source> open_source(const std::string& path, const OpenOptions& options);

std::shared_ptr<const Source> open_safetensors(const std::string& path, bool is_index,
                                               const OpenOptions& options);
std::shared_ptr<const Source> open_words(const std::string& path, const OpenOptions& options);

// --------------------------------------------------------------------------------------- quantised
// Tables whose numbers are codes: float8 and int8 are multiplied by the scales that stand beside
// them, as FP8 checkpoints (DeepSeek-V3, arXiv:2412.19437, 3.3) and compressed-tensors write them.

/// Scales of the codes of one table.
struct Scales {
  torch::Tensor values;  ///< float32; undefined: the numbers are no codes
  int64_t block_rows = 1;
  int64_t block_columns = 1;

  bool defined() const { return values.defined(); }

  /// The numbers of some rows: their codes [rows, columns] times their scales, in float32.
  torch::Tensor applied(const torch::Tensor& codes, const std::vector<int64_t>& rows) const;
};

/// The tensors beside a table: their entries by name, and their data.
struct Neighbours {
  EntryOf entry;
  std::function<torch::Tensor(const std::string&)> read;
};

/// The scales beside a table, without their values, and their name, which is empty if the numbers
/// are no codes. Throws c10::TypeError for codes that are not read here.
Scales scales_without_values(const TensorEntry& table, const Neighbours& neighbours,
                             std::string* name);

/// The scales beside a table.
Scales scales_of(const TensorEntry& table, const Neighbours& neighbours);

// --------------------------------------------------------------------------------------- narrowing
// Converts numbers of a file to the dtype that a caller asks for. A finite number must stay finite:
// 65520 would become infinity in float16 without a word.

/// A finite number that is not finite in another dtype.
struct Lost {
  int64_t index;  ///< in the flattened tensor
  double number;
};

/// Copies `from` to `to`, which has the same shape. Returns the first number that is lost.
std::optional<Lost> convert(const torch::Tensor& from, torch::Tensor to);

// -------------------------------------------------------------------------------------- token rows
// Files of model2vec, whose rows are not those of token ids: a mapping shares rows between tokens,
// and tokens have weights.

/// The rows of a model2vec file by token id, table[mapping] * weights; std::nullopt for other
/// files, and for tables of another name than that of the options.
/// @param by_word  whether rows are wanted by words, which name rows of the table
/// @throws c10::ValueError  by_word, and tokens have weights; or mapping or weights do not fit
std::optional<torch::Tensor> token_rows(const VectorFile& file, const ReadOptions& options,
                                        bool by_word);

// ------------------------------------------------------------------------------------------ python
// The library links no Python. Where posembed is loaded in Python, its operators posembed_python::*
// take progress and raise Python's own errors of files, whichever version of Python it is.

/// Raises FileFormatError or filesystem_error as Python's error of that kind; returns without
/// Python, and for other errors.
POSEMBED_API void raise_in_python(const std::exception& thrown);

/// Calls a reader, whose errors of files become Python's where there is Python.
template <typename Read>
auto with_python_errors(const Read& read) {
  try {
    return read();
  } catch (const std::exception& error) {
    raise_in_python(error);
    throw;
  }
}

/// Tells Python's bar of that number, 0 for none; Ctrl-C stops the reading. Null without Python.
POSEMBED_API Progress progress_in_python(int64_t bar);

/// A path from text with a character for each byte.
std::string path_of_text(const std::string& text);

/// From Python's names; throw c10::ValueError.
POSEMBED_API Missing missing_of(const std::string& text);
POSEMBED_API OnBadRow on_bad_row_of(const std::string& text);

// -------------------------------------------------------------------------------------- from file

/// The table that from_file() of modules reads: the rows of token ids or words, or all. Warns of
/// rows that were left out.
torch::Tensor table_from_file(const std::string& path,
                              const std::optional<std::vector<std::string>>& vocabulary,
                              const ReadOptions& read, const OpenOptions& open);

}  // namespace posembed::pretrained
