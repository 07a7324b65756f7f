// The interface behind VectorFile, with one implementation for files of tensors and one for files
// of words. Readers throw BadFile; with_path() adds the file's name.
#pragma once

#include <string>
#include <vector>

#include "posembed/pretrained.h"
#include "pretrained/bad_file.h"

namespace posembed::pretrained {

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

std::shared_ptr<const Source> open_safetensors(const std::string& path, bool is_index,
                                               const OpenOptions& options);
std::shared_ptr<const Source> open_words(const std::string& path, const OpenOptions& options);

}  // namespace posembed::pretrained
