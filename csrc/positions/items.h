// What the rules of positions share: rows of tokens, and the items that their placeholders make up.
#pragma once

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>

#include <limits>

#include "posembed/positions.h"

namespace posembed::positions {

using at::Tensor;

/// Kinds of tokens, as transformers numbers them; padding is none of them.
constexpr int64_t text = 0, image = 1, video = 2, audio = 3, padding = -1;

/// Rows with their visible tokens first. Without a mask, `visible` and `order` are undefined.
struct Sequence {
  Tensor ids;      // [batch, seq]
  Tensor types;    // [batch, seq]
  Tensor visible;  // bool [batch, seq]
  Tensor order;    // [batch, seq]: where each token was
};

/// The images, videos or audios of a batch, and their placeholders in its rows.
struct Items {
  const char* name;      // "images"
  const char* argument;  // "image_grids"
  Tensor sizes;          // [items, 3]: tokens along time, height and width
  Tensor total;          // []: placeholders of all items
  Tensor chosen;         // bool [batch, seq]: which tokens are placeholders
  // What follows, [batch, seq], has meaning for placeholders only.
  Tensor item;               // the number of the item
  Tensor height, width;      // its size in tokens
  Tensor time, row, column;  // the place in it
  Tensor last;               // bool: no more follows of the item or, if frames are separate, of it
  Tensor torn;               // bool: something else stands before it in its item or frame
};

/// What stands before (distance 1) or after (-1) each token of its row; `outside` beyond its ends.
inline Tensor neighbour(const Tensor& tokens, int64_t distance, int64_t outside) {
  const int64_t before = distance > 0 ? 1 : 0;
  return at::constant_pad_nd(tokens, {before, 1 - before}, outside)
      .narrow_symint(1, 1 - before, tokens.sym_size(1));
}

/// The entry of `column` at each of `indices`.
inline Tensor taken(const Tensor& column, const Tensor& indices) {
  return column.index_select(0, indices.flatten()).view_as(indices);
}

/// Sizes along time, height and width; grids without time have one frame.
inline Tensor with_time(const Tensor& grids) {
  return grids.sym_size(1) == 2 ? at::constant_pad_nd(grids, {1, 0}, 1) : grids;
}

/// Bool []: whether the tokens of sizes [items, 3], none negative, can be counted in 64 bits: if
/// not, their product may look right.
inline Tensor countable(const Tensor& sizes) {
  return sizes.to(at::kDouble).prod(1).sum().lt(0x1p53);
}

/// Whether values can be read without waiting for a device or breaking a graph.
inline bool readable(const Tensor& tensor) {
  return tensor.is_cpu() && !at::isTensorSubclassLike(tensor);
}

/// Integers that no operator takes as positions or indices, where values do not fit and cannot be
/// read; floating numbers become NaN.
inline Tensor or_none(const Tensor& tensor, const Tensor& fit) {
  const at::Scalar none = tensor.is_floating_point()
                              ? at::Scalar(std::numeric_limits<double>::quiet_NaN())
                              : at::Scalar(int64_t{std::numeric_limits<int32_t>::min()});
  return tensor.masked_fill(fit.logical_not(), none);
}

/// MiniCPM-V's positions: see MropeRule::canvas.
Tensor canvas_positions(const Sequence& sequence, const MropeRule& rule, const Items& images,
                        const Items& videos);

}  // namespace posembed::positions
