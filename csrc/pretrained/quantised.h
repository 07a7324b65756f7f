// Tables whose numbers are codes: float8 and int8 are multiplied by the scales that stand beside
// them, as FP8 checkpoints (DeepSeek-V3, arXiv:2412.19437, 3.3) and compressed-tensors write them.
#pragma once

#include <torch/types.h>

#include <functional>
#include <string>
#include <vector>

#include "pretrained/safetensors.h"

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

/// Reads a tensor by its name.
using ReadTensor = std::function<torch::Tensor(const std::string&)>;

/// The scales beside a table. Throws c10::TypeError for codes that only the program that wrote them
/// can turn into numbers: packed ones, integers without scales, and codes with zero points.
/// @param names  of all tensors beside the table
Scales scales_of(const TensorEntry& table, const std::vector<std::string>& names,
                 const ReadTensor& read);

}  // namespace posembed::pretrained
