// Tables whose numbers are codes: float8 and int8 are multiplied by the scales that stand beside
// them, as FP8 checkpoints (DeepSeek-V3, arXiv:2412.19437, 3.3) and compressed-tensors write them.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "pretrained/table_formats.h"

namespace posembed::pretrained {

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

}  // namespace posembed::pretrained
