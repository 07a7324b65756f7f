/// Files of pretrained vectors: safetensors (one file, or several with an index), word2vec binary
/// and text, fastText .vec, GloVe text. The first bytes identify the format. Opening a file reads
/// names and shapes only.
#pragma once

#include <c10/util/Exception.h>
#include <torch/arg.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "posembed/export.h"
#include "posembed/vocabulary.h"

namespace torch::nn {
class Module;
}

namespace posembed::pretrained {

/// A malformed file: truncated, inconsistent, or with text where a number should be.
class POSEMBED_API FileFormatError : public c10::ValueError {
 public:
  FileFormatError(std::string path, int64_t offset, std::string reason);

  const std::string& path() const { return path_; }
  /// The byte at which the fault was found.
  int64_t offset() const { return offset_; }
  const std::string& reason() const { return reason_; }

 private:
  std::string path_;
  int64_t offset_;
  std::string reason_;
};

enum class Format { safetensors, word2vec_binary, word2vec_text, glove };

/// "safetensors", "word2vec-binary", "word2vec-text" (fastText's .vec too) or "glove".
POSEMBED_API const char* name(Format format);

/// How to fill the rows of words that the file lacks.
enum class Missing {
  mean,  ///< the mean of the rows that were found
  zero,  ///< zeros
  /// random rows with the mean and the spread of the rows that were found, column by column, from
  /// torch's default generator: each word has its own
  random,
  error,  ///< raise c10::ValueError, which names the words; rows without a word become zeros
};

/// Which words of a vocabulary have rows in a file.
struct Coverage {
  int64_t found = 0;                   ///< words with a row
  std::vector<std::string> missing;    ///< words without a row
  std::vector<std::string> duplicate;  ///< words with several rows, of which the first was taken
};

/// Whether a row that cannot be read is an error: one with too few or too many numbers, with text,
/// infinity or NaN in place of a finite number, or with a word that is not UTF-8.
enum class OnBadRow {
  raise,  ///< FileFormatError
  skip,   ///< the row is left out; VectorFile::skipped() reports it
};

/// A row that was left out.
struct SkippedRow {
  int64_t row;         ///< its number in the file, from 1
  int64_t offset;      ///< the byte at which the fault was found
  std::string word;    ///< what it begins with
  std::string reason;  ///< what is wrong
};

/// The rows that were left out.
struct Skipped {
  int64_t count = 0;
  std::vector<SkippedRow> rows;  ///< the first 100 of them
};

/// The rows of a vocabulary's words, in its order.
struct Rows {
  torch::Tensor vectors;  ///< [vocabulary, dim]
  Coverage coverage;
};

/// Called from time to time with the bytes read so far and in total. An exception stops the
/// reading.
using Progress = std::function<void(int64_t done, int64_t total)>;

/// Another word for a word that the file lacks, such as its lower-case form.
using Fallback = std::function<std::string(const std::string&)>;

/// How to open a file.
struct POSEMBED_API OpenOptions {
  /// The word of each row, for safetensors, which have none: a tokenizer's tokens by id.
  TORCH_ARG(std::vector<std::string>, words);
  /// Whether a word that is not UTF-8 is an error; otherwise U+FFFD replaces its invalid bytes.
  TORCH_ARG(bool, check_utf8) = true;
  /// Whether a row that cannot be read is an error. Skipping such rows needs a second pass over a
  /// file of words; in text, it counts lines and ignores the header's number of rows.
  TORCH_ARG(OnBadRow, on_bad_row) = OnBadRow::raise;
};

/// How to read a table.
struct POSEMBED_API ReadOptions {
  /// The table's name, if the file has several.
  TORCH_ARG(std::string, tensor);
  /// The result's dtype; default: as in the file, float32 for codes with scales. A finite number
  /// that is not finite in this dtype is an error.
  TORCH_ARG(std::optional<torch::Dtype>, dtype) = std::nullopt;
  /// How to fill the rows of words that the file lacks.
  TORCH_ARG(Missing, missing) = Missing::mean;
  /// Whose row is taken for a word that the file lacks, if the file has that; the file's words are
  /// then read twice.
  TORCH_ARG(Fallback, fallback);
  /// Called with the progress of reading.
  TORCH_ARG(Progress, progress);
};

class Source;

/// An open file of vectors. In a file of words, the only table is named "vectors".
///
///     const auto file = posembed::pretrained::open("glove.6B.300d.txt");
///     const auto rows = file.rows({"king", "queen"});   // vectors [2, 300]; what was missing
///     auto table = posembed::pretrained::open("model.safetensors").tensor("wte.weight");
class POSEMBED_API VectorFile {
 public:
  explicit VectorFile(std::shared_ptr<const Source> source) : source_(std::move(source)) {}

  const std::string& path() const;
  Format format() const;

  /// The names of all tensors, in the file's order.
  std::vector<std::string> names() const;
  /// A tensor's shape, in torch's elements: two 4-bit numbers are one element. Reads no data,
  /// except that GloVe's lines are counted at the first call.
  std::vector<int64_t> shape(const std::string& name) const;
  /// A tensor's dtype in the file; float32 for text.
  /// @throws c10::TypeError torch has no such dtype
  torch::Dtype dtype(const std::string& name) const;

  /// A whole tensor. From safetensors, in the file's own dtype, this is a copy-on-write view of the
  /// mapped file: pages take memory when they are touched, and writing never changes the file. The
  /// view may outlive this object. Do not truncate the file or rewrite it in place while a view is
  /// in use: touching a page that the file no longer has ends the process. With `copy`, the result
  /// is in memory, whatever happens to the file.
  /// @throws FileFormatError the file is malformed or was shortened, or a finite number is not
  ///     finite in `dtype`
  torch::Tensor tensor(const std::string& name = "vectors",
                       std::optional<torch::Dtype> dtype = std::nullopt,
                       const Progress& progress = nullptr, bool copy = false) const;

  /// The word of each row.
  std::vector<std::string> words() const;

  /// Reads the rows of words; if a word has several rows, the first. An empty word stands for a row
  /// without a word, which is filled like that of a missing word.
  /// @throws c10::ValueError a word is given twice; no word is found and `missing` is mean or
  ///     random
  Rows rows(const std::vector<std::string>& vocabulary, const ReadOptions& options = {}) const;

  /// The same for very many words, without a fallback. The vocabulary records which were found.
  torch::Tensor rows(Vocabulary& vocabulary, const ReadOptions& options = {}) const;

  /// The coverage that rows() would report, without reading the vectors. The words of safetensors
  /// are those given to open().
  Coverage coverage(const std::vector<std::string>& vocabulary, const Progress& progress = nullptr,
                    const Fallback& fallback = nullptr) const;

  /// The same for very many words.
  void look_up(Vocabulary& vocabulary, const Progress& progress = nullptr) const;

  /// The rows that were left out, if the file was opened with OnBadRow::skip.
  Skipped skipped() const;

  /// A copy of a whole table.
  torch::Tensor table(const ReadOptions& options = {}) const;

 private:
  std::shared_ptr<const Source> source_;
};

/// Opens a file, or the index (.json) of a sharded model. A shard is open only while one of its
/// tensors is read.
/// @throws FileFormatError the format is unknown, or the header is malformed
/// @throws std::filesystem::filesystem_error the file cannot be read
POSEMBED_API VectorFile open(const std::string& path, const OpenOptions& options = {});

/// How load_state() matches a module's tensors with a file's. `name` is that of a parameter or
/// buffer.
struct POSEMBED_API LoadOptions {
  /// Its name in the file; default: the same name.
  TORCH_ARG(std::function<std::string(const std::string& name)>, name_in_file);
  /// Instead of name_in_file(): the tensors of the file that it joins, one below the other.
  TORCH_ARG(std::function<std::vector<std::string>(const std::string& name)>, names_in_file);
  /// What becomes of the file's tensor, in the file's dtype, before it is compared and copied: a
  /// transposed tensor, or a part.
  TORCH_ARG(std::function<torch::Tensor(const std::string& name, const torch::Tensor& tensor)>,
            transform);
  /// Whether a tensor that only the module or only the file has is an error.
  TORCH_ARG(bool, strict) = true;
};

/// What load_state() did not load, in the file's names.
struct Unmatched {
  std::vector<std::string> missing;     ///< parameters and buffers that the file lacks
  std::vector<std::string> unexpected;  ///< tensors that the module lacks
};

/// Copies a file's tensors to the parameters and buffers of any module, by name, as Python's
/// load_state_dict does. They keep their dtype and device: floats are converted to other floats and
/// integers to other integers, but numbers of one byte, which are codes, never. Names, shapes and
/// dtypes are checked before the first tensor is written.
///
///     MyModel model;  // a ModuleHolder; its modules are registered under the file's names
///     posembed::pretrained::load_state(*model, posembed::pretrained::open("model.safetensors"));
///
/// GPT-2's projections are stored as [inputs, outputs]:
///
///     const auto options = posembed::pretrained::LoadOptions().transform(
///         [](const std::string& name, const torch::Tensor& tensor) {
///           return name.find("proj.weight") == std::string::npos ? tensor : tensor.t();
///         });
///
/// @param file  safetensors, or their index
/// @throws c10::ValueError a name without a partner, if `strict`; no name with a partner; another
///     shape
/// @throws c10::TypeError a dtype that is not converted
/// @throws FileFormatError the file is malformed, or a finite number is not finite in the
///     parameter's dtype
POSEMBED_API Unmatched load_state(torch::nn::Module& module, const VectorFile& file,
                                  const LoadOptions& options = {});

}  // namespace posembed::pretrained
