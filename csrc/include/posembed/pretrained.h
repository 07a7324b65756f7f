/// Files of pretrained vectors: safetensors (one file, or several with an index), word2vec binary
/// and text, fastText .vec, GloVe text. Told apart by their first bytes; memory-mapped, so that
/// opening one reads names and shapes only.
#pragma once

#include <c10/util/Exception.h>
#include <torch/arg.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "posembed/export.h"

namespace posembed::pretrained {

/// A file that is not what it should be: cut off, contradicting itself, not a number.
class POSEMBED_API FileFormatError : public c10::ValueError {
 public:
  FileFormatError(std::string path, int64_t offset, std::string reason);

  const std::string& path() const { return path_; }
  /// The byte where it shows.
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

/// What words without a row get.
enum class Missing {
  mean,   ///< the mean of the rows that were found
  zero,   ///< zeros
  error,  ///< c10::ValueError naming them; rows that no word names become zeros
};

/// What became of a vocabulary's words.
struct Coverage {
  int64_t found = 0;                   ///< words with a row
  std::vector<std::string> missing;    ///< words without
  std::vector<std::string> duplicate;  ///< words with several rows, of which the first was taken
};

/// Rows for a vocabulary's words, in its order.
struct Rows {
  torch::Tensor vectors;  ///< [vocabulary, dim]
  Coverage coverage;
};

/// Called now and then with the bytes read and the bytes in all; what it throws ends the reading.
using Progress = std::function<void(int64_t done, int64_t total)>;

/// How to open a file.
struct POSEMBED_API OpenOptions {
  /// The word of each row of a table, for safetensors: the tokenizer's, in the order of ids.
  TORCH_ARG(std::vector<std::string>, words);
  /// Refuse files with a word that is not UTF-8; false: give such words as they are.
  TORCH_ARG(bool, check_utf8) = true;
};

/// How to read a table.
struct POSEMBED_API ReadOptions {
  /// The table, in a file that has several.
  TORCH_ARG(std::string, tensor);
  /// Convert to it while reading; none: as in the file.
  TORCH_ARG(std::optional<torch::Dtype>, dtype) = std::nullopt;
  /// What words without a row get.
  TORCH_ARG(Missing, missing) = Missing::mean;
  /// Told how far reading is.
  TORCH_ARG(Progress, progress);
};

class Source;

/// An open file of vectors. A file of words has one table, named "vectors".
///
///     const auto file = posembed::pretrained::open("glove.6B.300d.txt");
///     const auto rows = file.rows({"king", "queen"});   // vectors [2, 300]; what was missing
///     auto table = posembed::pretrained::open("model.safetensors").tensor("wte.weight");
class POSEMBED_API VectorFile {
 public:
  explicit VectorFile(std::shared_ptr<const Source> source) : source_(std::move(source)) {}

  const std::string& path() const;
  Format format() const;

  /// The tables' names, in the file's order.
  std::vector<std::string> names() const;
  /// Without reading data, but for GloVe's text, whose lines are counted at the first call.
  std::vector<int64_t> shape(const std::string& name) const;
  /// As in the file; text reads as float32 unless asked otherwise.
  /// @throws c10::TypeError where torch has no such dtype
  torch::Dtype dtype(const std::string& name) const;

  /// A whole tensor. From safetensors, in the file's own dtype, it is a view of the file: memory is
  /// taken as it is touched; writing to it copies the page and never changes the file. It may
  /// outlive this object. Do not shorten or rewrite the file in place while a view is in use.
  torch::Tensor tensor(const std::string& name = "vectors",
                       std::optional<torch::Dtype> dtype = std::nullopt,
                       const Progress& progress = nullptr) const;

  /// The word of each row.
  std::vector<std::string> words() const;

  /// Rows for words. The first of several rows of a word is taken. An empty word stands for a row
  /// that no word names: it is filled like a missing one.
  /// @throws c10::ValueError a word given twice; none found and nothing to take the mean of
  Rows rows(const std::vector<std::string>& vocabulary, const ReadOptions& options = {}) const;

  /// What rows() would find; reads words only.
  Coverage coverage(const std::vector<std::string>& vocabulary,
                    const Progress& progress = nullptr) const;

  /// A whole table as memory of its own.
  torch::Tensor table(const ReadOptions& options = {}) const;

 private:
  std::shared_ptr<const Source> source_;
};

/// Opens a file, or the index (.json) of a model in several.
/// @throws FileFormatError the file is none of the formats, or broken where it was looked at
/// @throws std::filesystem::filesystem_error it cannot be read
POSEMBED_API VectorFile open(const std::string& path, const OpenOptions& options = {});

}  // namespace posembed::pretrained
