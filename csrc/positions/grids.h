// The places of the tokens of pictures that are packed one after another, as vision-language models
// give them to a vision tower.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>
#include <optional>

namespace posembed::positions {

/// A token's place in its picture, and the picture's size: int64 [tokens] each. The tokens of a
/// frame are ordered by squares of merge x merge.
struct Places {
  at::Tensor time, row, column;
  at::Tensor height, width;
  at::Tensor fit;  // bool []: whether the grids have that many tokens; undefined if checked
};

/// @param grids  int [pictures, 3] or [pictures, 2]; values are checked on the CPU
/// @param num_tokens  default: that of the grids, for which a GPU is waited for
Places places_of(const at::Tensor& grids, int64_t merge,
                 const std::optional<c10::SymInt>& num_tokens);

/// grids: int [items, 3] or [items, 2]
void check_grids(const at::Tensor& grids, const char* argument);

}  // namespace posembed::positions
