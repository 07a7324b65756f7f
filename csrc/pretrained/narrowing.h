// Converts numbers of a file to the dtype that a caller asks for. A finite number must stay finite:
// 65520 would become infinity in float16 without a word.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <optional>

namespace posembed::pretrained {

/// A finite number that is not finite in another dtype.
struct Lost {
  int64_t index;  ///< in the flattened tensor
  double number;
};

/// Copies `from` to `to`, which has the same shape. Returns the first number that is lost.
std::optional<Lost> convert(const torch::Tensor& from, torch::Tensor to);

}  // namespace posembed::pretrained
