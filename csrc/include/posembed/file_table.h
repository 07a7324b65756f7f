/// Tables that stay in their file: a look-up reads its rows and no others, so a table may be larger
/// than memory. The system keeps what was read while it has memory to spare.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "posembed/export.h"
#include "posembed/quantized.h"

namespace posembed {

/// An open table in safetensors. It is read by system calls: if the file is shortened, a look-up
/// throws, and no other thread is stopped while one waits for the disk. Copies share the table.
class POSEMBED_API FileRows {
 public:
  /// @param path  safetensors, or the index (.json) of several
  /// @param tensors  the table's name, or those of its parts in order; none: the only table
  /// @throws pretrained::FileFormatError a malformed file; c10::ValueError no such table, or parts
  ///     that do not fit together; c10::TypeError a dtype that is neither numbers nor codes
  explicit FileRows(const std::string& path, const std::vector<std::string>& tensors = {});

  int64_t num_embeddings() const;
  int64_t embedding_dim() const;
  /// The dtype of the numbers; float32 for codes, which are multiplied by the scales beside them.
  torch::Dtype dtype() const;
  /// The bytes in files and in memory.
  int64_t bytes_in_files() const;
  int64_t bytes_in_memory() const;

  /// Asks for the rows of ids in the background, so that a look-up will find them in memory.
  /// Returns at once. Ids are on the CPU.
  /// @throws c10::IndexError an id is outside the table
  void prefetch(const torch::Tensor& ids) const;
  /// The rows so far that were not in the system's memory when they were looked up.
  int64_t misses() const;

  /// The whole table in memory, as codes with their scales.
  /// @throws c10::TypeError it has no codes
  QuantizedRows codes() const;

  /// The same table as shorter rows, as QuantizedRows::split().
  std::optional<FileRows> split(int64_t parts) const;

  /// Names the table in calls of torch.ops.posembed.file_rows while it is open.
  int64_t handle() const;

  class Implementation;

 private:
  explicit FileRows(std::shared_ptr<const Implementation> implementation);

  std::shared_ptr<const Implementation> implementation_;
};

namespace functional {

/// scale * rows of ids; no gradient.
/// @param ids  int32 or int64 [...] on the CPU, from 0 to num_embeddings - 1
/// @param dtype  of the result [..., embedding_dim]; default: the table's
/// @throws c10::IndexError ids; pretrained::FileFormatError the file was shortened
POSEMBED_API torch::Tensor embedding(const torch::Tensor& ids, const FileRows& rows,
                                     double scale = 1.0,
                                     std::optional<torch::Dtype> dtype = std::nullopt);

}  // namespace functional

/// Rows that FileTable::prefetch() asked for.
class POSEMBED_API RowsAhead {
 public:
  /// The rows of the ids as they were when they were asked for, once.
  /// @throws c10::Error they were taken before
  torch::Tensor take();

 private:
  friend class FileTableImpl;
  RowsAhead(FileRows rows, torch::Tensor ids, double scale, torch::Dtype dtype);

  FileRows rows_;
  torch::Tensor ids_;
  double scale_;
  torch::Dtype dtype_;
};

/// A table in a file as a module.
///
///     posembed::FileTable table(posembed::FileRows("model.safetensors", {"ngrams.weight"}));
///     auto ahead = table->prefetch(next_ids);
///     auto vectors = table->forward(ids);  // [...] -> [..., embedding_dim]
///     auto next = ahead.take();
class POSEMBED_API FileTableImpl : public torch::nn::Cloneable<FileTableImpl> {
 public:
  /// @param dtype  of the results; default: the table's
  explicit FileTableImpl(FileRows rows, std::optional<torch::Dtype> dtype = std::nullopt);

  void reset() override {}
  void pretty_print(std::ostream& stream) const override;
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

  /// ids [...] -> scale * rows [..., embedding_dim]; see functional::embedding.
  torch::Tensor forward(const torch::Tensor& ids, double scale = 1.0);
  /// Asks for the rows of a later call in the background, and returns at once.
  /// @throws c10::IndexError an id is outside the table
  RowsAhead prefetch(const torch::Tensor& ids, double scale = 1.0) const;

  FileRows rows;
  torch::Dtype dtype;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(1.0)})
};

TORCH_MODULE(FileTable);

}  // namespace posembed
