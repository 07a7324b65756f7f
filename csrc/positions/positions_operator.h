// C++ calls of the operators that number tokens, through the dispatcher as in Python.
#pragma once

#include <ATen/TensorSubclassLikeUtils.h>
#include <c10/core/SymInt.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "dispatcher/operator.h"
#include "posembed/positions.h"

namespace posembed::dispatcher {

template <>
struct EnumArgument<MropeTime> {
  static constexpr const char* argument = "time";
  static constexpr const char* names[] = {"index", "interval", "elapsed", "exact"};
};

}  // namespace posembed::dispatcher

namespace posembed::positions {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using MaybeSize = std::optional<c10::SymInt>;
using Text = std::string_view;

/// Arguments of mrope_positions after the ids, in the order of its schema.
struct MropeInputs {
  std::string rule;  // MropeRule::to_json(), or a name
  MropeCall call;

  POSEMBED_FIELDS(self.rule, self.call.image_grids(), self.call.video_grids(),
                  self.call.seconds_per_grid(), self.call.audio_lengths(),
                  self.call.attention_mask(), self.call.token_types())
};

/// Positions [axes, batch, seq] and delta [batch, 1].
inline const dispatcher::Operator<std::tuple<Tensor, Tensor>(const Tensor&), MropeInputs>
    mrope_positions{"mrope_positions"};

inline const dispatcher::Operator<Tensor(c10::SymInt, c10::SymInt, c10::SymInt, bool,
                                         at::ArrayRef<double>, at::ArrayRef<double>, Text,
                                         c10::SymInt, std::optional<at::Device>)>
    grid_positions{"grid_positions"};

/// Of the tokens of several grids: order, merge, number of tokens.
inline const dispatcher::Operator<Tensor(const Tensor&, Text, int64_t, MaybeSize)>
    packed_grid_positions{"packed_grid_positions"};

/// cu_seqlens, number of tokens, and the first position of each document (none: 0).
inline const dispatcher::Operator<Tensor(const Tensor&, MaybeSize, const MaybeTensor&)>
    packed_positions{"packed_positions"};

inline const dispatcher::Operator<Tensor(const Tensor&)> document_positions{"document_positions"};

/// indices, positions, cu_seqlens.
inline const dispatcher::Operator<std::tuple<Tensor, Tensor, Tensor>(const Tensor&, int64_t,
                                                                     int64_t, MaybeSize)>
    zigzag_positions{"zigzag_positions"};

/// order: axes among "thw", each at most once
void check_order(Text order);

// ------------------------------------------------------------------------------------------- items
// What the rules of positions share: rows of tokens, and the items that their placeholders make up.

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

// ------------------------------------------------------------------------------------------- grids
// The places of the tokens of pictures that are packed one after another, as vision-language models
// give them to a vision tower.

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

// -------------------------------------------------------------------------------------------- rule
// Rules as operators receive them: text, which is parsed once.

/// The rule of a JSON text or of a name. Throws c10::ValueError for others.
std::shared_ptr<const MropeRule> rule_of(std::string_view text);

}  // namespace posembed::positions
