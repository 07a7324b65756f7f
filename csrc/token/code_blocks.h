// Blocks of a table of codes, whose numbers share a scale.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <optional>

#include "dispatcher/checked.h"

namespace posembed::token {

struct CodeBlocks {
  int64_t rows, columns;

  /// Blocks in a row of `dim` numbers.
  int64_t in_row(int64_t dim) const { return dim / columns + (dim % columns != 0); }
};

/// The blocks of the same table if each row of `dim` numbers is read as `parts` rows; the scales
/// keep their order. None if a block reaches over the end of a part but not over the whole row.
inline std::optional<CodeBlocks> split(CodeBlocks blocks, int64_t dim, int64_t parts) {
  TORCH_CHECK_VALUE(parts >= 1 && dim % parts == 0, "parts: expected a divisor of ", dim, ", got ",
                    parts);
  const int64_t part = dim / parts;
  if (dim == 0) return std::nullopt;
  if (blocks.columns >= dim)
    return CodeBlocks{dispatcher::product(blocks.rows, parts, "parts"), part};
  if (blocks.rows > 1 || part % blocks.columns != 0) return std::nullopt;
  return blocks;
}

}  // namespace posembed::token
