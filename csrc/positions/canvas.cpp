// MiniCPM-V 4.7's canvas (OpenBMB): a picture's thumbnail is stretched over the canvas that its
// slices tile, and the markers around them have places there. What belongs to a frame, a thumbnail
// with its slices, is reduced by scatter into one entry for each.
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <limits>

#include "positions/items.h"

namespace posembed::positions {
namespace {

/// Values of frames at each of their tokens. `frame` counts frames over the whole batch.
struct Frames {
  Tensor frame;  // [batch, seq]

  /// The largest of `values` at `chosen` tokens of each token's frame; 0 if there is none.
  Tensor largest(const Tensor& values, const Tensor& chosen) const {
    return reduced(values * chosen, 0, "amax");
  }
  /// The smallest; the largest integer if there is none.
  Tensor smallest(const Tensor& values, const Tensor& chosen) const {
    constexpr int64_t none = std::numeric_limits<int64_t>::max();
    return reduced(values.masked_fill(chosen.logical_not(), none), none, "amin");
  }
  Tensor count(const Tensor& chosen) const { return reduced(chosen.to(at::kLong), 0, "sum"); }

 private:
  Tensor reduced(const Tensor& values, int64_t start, std::string_view reduction) const {
    const Tensor entries = at::full_symint({frame.sym_numel() + 1}, start, frame.options());
    return taken(entries.scatter_reduce(0, frame.flatten(), values.flatten(), reduction), frame);
  }
};

/// torch.linspace(0, canvas - 1, size).round() at `index`, with its float32 rounding.
Tensor stretched(const Tensor& index, const Tensor& size, const Tensor& canvas) {
  const Tensor end = (canvas - 1).to(at::kFloat), steps = (size - 1).clamp_min(1).to(at::kFloat);
  const Tensor step = end / steps, after = size - 1 - index;
  const Tensor place = at::where(index < size.div(2, "floor"), step * index, end - step * after);
  return at::where(size.eq(1), at::Scalar(0), place.round().to(at::kLong));
}

Tensor is_marker(const Tensor& ids, const std::vector<int64_t>& markers) {
  Tensor found = ids.eq(markers[0]);
  for (const int64_t marker : markers) found = found.logical_or(ids.eq(marker));
  return found;
}

/// The latest index at which `chosen` was true, up to each token; -1 before.
Tensor latest(const Tensor& index, const Tensor& chosen) {
  return std::get<0>(index.masked_fill(chosen.logical_not(), -1).cummax(1));
}

}  // namespace

Tensor canvas_positions(const Sequence& sequence, const MropeRule& rule, const Items& images,
                        const Items& videos) {
  const Tensor &ids = sequence.ids, &types = sequence.types;
  const int64_t slice_start = rule.canvas[2];
  const auto of_item = [&](const Tensor& of_image, const Tensor& of_video) {
    return at::where(images.chosen, of_image, of_video);
  };
  const Tensor height = of_item(images.height, videos.height),
               width = of_item(images.width, videos.width);
  const Tensor index = at::ones_like(types).cumsum(1) - 1, media = types.gt(text);

  // A crop is a run of placeholders. It is a slice after slice_start, else a frame's thumbnail.
  const Tensor crop_begins = media.logical_and(types.ne(neighbour(types, 1, padding)));
  const Tensor crop_ends = media.logical_and(types.ne(neighbour(types, -1, padding)));
  const Tensor slice_begins = crop_begins.logical_and(neighbour(ids, 1, -1).eq(slice_start))
                                  .logical_and(crop_begins.cumsum(1) > 1);
  const Tensor thumb_begins = crop_begins.logical_and(slice_begins.logical_not());
  const auto shifted = [](const Tensor& flags, int64_t distance) {
    return neighbour(flags.to(at::kLong), distance, 0).ne(0);
  };
  const Tensor begins = shifted(thumb_begins, -1);  // the token before a thumbnail
  const Frames frames{begins.flatten().cumsum(0).view_as(begins)};

  // A frame ends after the markers that follow its last crop.
  const Tensor last_media = latest(index, media);
  const Tensor plain = media.logical_or(is_marker(ids, rule.canvas)).logical_not();
  const Tensor before_end = index <= frames.largest(index, media);
  const Tensor inside =
      before_end.logical_or(latest(index, plain) < last_media).logical_and(begins.cumsum(1) > 0);

  // Slices are laid out by rows; a gap of more than two markers before a slice ends a row.
  const Tensor slices = frames.count(slice_begins), begun = slice_begins.cumsum(1);
  const Tensor slice = begun - frames.largest(begun, begins) - 1;  // -1 up to the first
  const Tensor gap = index - neighbour(last_media, 1, -1) - 1;
  const Tensor breaks = slice_begins.logical_and(slice > 0).logical_and(gap > 2);
  const Tensor in_row = at::minimum(frames.smallest(slice, breaks), slices).clamp_min(1);
  const Tensor columns = at::where(slices.remainder(in_row).eq(0), in_row, slices).clamp_min(1);
  const Tensor first = slice_begins.logical_and(slice.eq(0));
  const Tensor slice_height = frames.largest(height, first),
               slice_width = frames.largest(width, first);
  const Tensor rows = slices.div(columns, "floor");
  const Tensor sliced = slices > 0;
  const Tensor canvas_height =
      at::where(sliced, rows * slice_height, frames.largest(height, thumb_begins));
  const Tensor canvas_width =
      at::where(sliced, columns * slice_width, frames.largest(width, thumb_begins));

  // Text counts tokens outside of frames; a frame takes the longer side of its canvas, and one.
  const Tensor outside = inside.logical_not().to(at::kLong);
  const Tensor advance = at::maximum(canvas_height, canvas_width) + 1;
  const Tensor origin =
      outside.cumsum(1) - outside + (advance * begins).cumsum(1) - advance * inside;

  // Places on the canvas. Where a token has several, the last of these counts.
  const Tensor in_slice = slice >= 0, after_crop = shifted(crop_ends, 1);
  const auto along = [&](const Tensor& own, const Tensor& size, const Tensor& canvas,
                         const Tensor& offset, const Tensor& next_offset, const Tensor& row_end) {
    Tensor place = at::where(begins, -origin.gt(0).to(at::kLong), at::zeros_like(origin));
    const Tensor corner = at::where(in_slice, offset + neighbour(size, 1, 0) - 1, canvas);
    place = at::where(after_crop.logical_and(begins.logical_not()), corner, place);
    const Tensor starts = shifted(slice_begins, -1);
    place = at::where(starts, next_offset, place);
    const Tensor between = in_slice.logical_and(slice + 1 < slices)
                               .logical_and(after_crop.logical_or(starts).logical_not());
    place = at::where(between, row_end, place);
    return at::where(media, at::where(in_slice, offset + own, stretched(own, size, canvas)), place);
  };
  const auto row_of = [&](const Tensor& number) { return number.div(columns, "floor"); };
  const auto column_of = [&](const Tensor& number) { return number.remainder(columns); };
  const Tensor next = slice + 1;
  const Tensor row =
      along(of_item(images.row, videos.row), height, canvas_height, row_of(slice) * slice_height,
            row_of(next) * slice_height, (row_of(slice) + 1) * slice_height - 1);
  const Tensor column =
      along(of_item(images.column, videos.column), width, canvas_width,
            column_of(slice) * slice_width, column_of(next) * slice_width, columns * slice_width);
  return at::stack({origin, origin + row * inside, origin + column * inside});
}

}  // namespace posembed::positions
