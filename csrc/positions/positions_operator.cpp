// Positions of grids, of documents packed into one sequence, and of parts of these.
#include "positions/positions_operator.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "core/brief.h"
#include "dispatcher/output_memory.h"
#include "posembed/offset.h"

namespace posembed::positions {
namespace {

at::TensorOptions whole(at::Device device) { return at::TensorOptions(device).dtype(at::kLong); }

// --------------------------------------------------------------------------------------- grids

constexpr Text axis_names = "thw";

/// A number for each axis, from none, one or three.
std::array<double, 3> of_axes(at::ArrayRef<double> numbers, double otherwise,
                              const char* argument) {
  TORCH_CHECK_VALUE(numbers.size() <= 1 || numbers.size() == 3, argument,
                    ": expected a number, or one each for time, height and width, got ",
                    numbers.size(), " numbers");
  for (const double number : numbers) {
    TORCH_CHECK_VALUE(std::isfinite(number), argument, ": expected finite numbers, got ", number);
  }
  if (numbers.empty()) return {otherwise, otherwise, otherwise};
  if (numbers.size() == 1) return {numbers[0], numbers[0], numbers[0]};
  return {numbers[0], numbers[1], numbers[2]};
}

bool counts(double offset) { return offset >= 0 && offset == std::floor(offset); }

/// Checks that positions are finite in float32, or exact as float64's and int64's whole numbers.
void check_range(const std::array<double, 3>& factors, const std::array<double, 3>& shifts,
                 bool floating) {
  constexpr double longest = std::numeric_limits<int32_t>::max();
  const double most = floating ? std::numeric_limits<float>::max() : 0x1p53 - longest;
  for (size_t i = 0; i < factors.size(); ++i) {
    TORCH_CHECK_VALUE(!floating || std::abs(factors[i]) * longest <= most / 2,
                      "scale: expected at most ", most / 2 / longest, ", got ", factors[i]);
    TORCH_CHECK_VALUE(std::abs(shifts[i]) <= (floating ? most / 2 : most),
                      "offset: expected at most ", floating ? most / 2 : most, ", got ", shifts[i]);
  }
}

Tensor compute_grid(c10::SymInt frames, c10::SymInt height, c10::SymInt width, bool centred,
                    at::ArrayRef<double> scale, at::ArrayRef<double> offset, Text order,
                    c10::SymInt merge, std::optional<at::Device> device) {
  dispatcher::check_length(frames, "frames");
  dispatcher::check_length(height, "height");
  dispatcher::check_length(width, "width");
  check_order(order);
  dispatcher::check_length(merge, "merge");
  dispatcher::check_result({frames, height, width}, at::kDouble, "frames");
  TORCH_CHECK_VALUE(merge >= 1 && height % merge == 0 && width % merge == 0,
                    "merge: expected a divisor of height ", height, " and width ", width, ", got ",
                    merge);
  const std::array<double, 3> factors = of_axes(scale, 1.0, "scale"),
                              shifts = of_axes(offset, 0.0, "offset");
  const bool floating =
      centred || !scale.empty() || !counts(shifts[0]) || !counts(shifts[1]) || !counts(shifts[2]);
  check_range(factors, shifts, floating);
  const std::array<c10::SymInt, 3> sizes = {frames, height, width};
  // Each axis as a view of [frames, rows of squares, columns of squares, rows, columns].
  const c10::SymDimVector shape = {frames, height / merge, width / merge, merge, merge};
  std::vector<Tensor> axes;
  for (const char axis : order) {
    const size_t i = axis_names.find(axis);
    Tensor line = at::arange(sizes[i], whole(device.value_or(at::kCPU)));
    if (floating) {
      line = line.to(at::kDouble);
      if (centred) line = line - line.mean();
      line = (line * factors[i] + shifts[i]).to(at::kFloat);
    } else {
      line = line + static_cast<int64_t>(shifts[i]);
    }
    c10::SymDimVector view = {1, 1, 1, 1, 1};
    if (i == 0) view[0] = frames;
    if (i > 0) view[i] = sizes[i] / merge, view[i + 2] = merge;
    axes.push_back(line.view_symint(view).expand_symint(shape).reshape_symint({-1}));
  }
  return at::stack(axes);
}

// ----------------------------------------------------------------------------------- documents

/// Bool []: what check_documents() checks.
Tensor documents_fit(const Tensor& boundaries, const c10::SymInt& total, int64_t divisor) {
  const Tensor lengths = boundaries.diff();
  return boundaries.select(0, 0)
      .eq(0)
      .logical_and(boundaries.select(0, -1).eq(at::Scalar(total)))
      .logical_and(lengths.ge(0).logical_and(lengths.remainder(divisor).eq(0)).all());
}

/// Checks boundaries on the CPU: from 0 to `total`, in order, lengths that `divisor` divides.
void check_documents(const Tensor& cu_seqlens, int64_t total, int64_t divisor) {
  const Tensor boundaries = cu_seqlens.to(at::kLong), lengths = boundaries.diff();
  const int64_t first = boundaries[0].item<int64_t>(), last = boundaries[-1].item<int64_t>();
  TORCH_CHECK_VALUE(first == 0 && last == total, "cu_seqlens: expected 0 to ", total, ", got ",
                    first, " to ", last);
  if (lengths.numel() == 0) return;
  const int64_t shortest = lengths.min().item<int64_t>();
  TORCH_CHECK_VALUE(shortest >= 0, "cu_seqlens: expected numbers that do not decrease, got a ",
                    "length of ", shortest);
  const Tensor odd = lengths.remainder(divisor).ne(0);
  if (!odd.any().item<bool>()) return;
  const int64_t document = odd.nonzero()[0].item<int64_t>();
  TORCH_CHECK_VALUE(false, "cu_seqlens: expected lengths that are multiples of 2 * world_size, ",
                    divisor, ", got ", lengths[document].item<int64_t>(), " for document ",
                    document);
}

/// The number of tokens: given, or read from the boundaries.
c10::SymInt total_of(const Tensor& cu_seqlens, const MaybeSize& num_tokens) {
  if (!num_tokens.has_value()) return cu_seqlens.select(0, -1).item().toSymInt();
  dispatcher::check_length(*num_tokens, "num_tokens");
  return *num_tokens;
}

/// The document of each token.
Tensor documents_of(const Tensor& cu_seqlens, const Tensor& tokens) {
  return (at::searchsorted(cu_seqlens, tokens, /*out_int32=*/false, /*right=*/true) - 1)
      .clamp_min(0);
}

/// The first position of each document.
void check_offsets(const Tensor& offset, const Tensor& cu_seqlens) {
  dispatcher::check_position_integers(offset, "offset");
  const c10::SymInt documents = cu_seqlens.sym_size(0) - 1;
  TORCH_CHECK_VALUE(offset.dim() == 1 && offset.sym_size(0) == documents,
                    "offset: expected a number or [documents] with documents ", documents, ", got ",
                    offset.sym_sizes());
}

Tensor compute_packed(const Tensor& cu_seqlens, MaybeSize num_tokens, const MaybeTensor& offset) {
  dispatcher::check_boundaries(cu_seqlens);
  if (offset.has_value()) check_offsets(*offset, cu_seqlens);
  const c10::SymInt total = total_of(cu_seqlens, num_tokens);
  if (readable(cu_seqlens)) check_documents(cu_seqlens, total.expect_int(), 1);
  const Tensor boundaries = cu_seqlens.to(at::kLong);
  const Tensor tokens = at::arange(total, whole(cu_seqlens.device()));
  const Tensor document = documents_of(boundaries, tokens);
  Tensor positions = tokens - boundaries.index_select(0, document);
  if (offset.has_value()) {
    // A last entry for tokens beyond the documents, where boundaries do not fit.
    const Tensor first = at::constant_pad_nd(offset->to(at::kLong), {0, 1}, 0);
    positions = positions + first.index_select(0, document);
  }
  if (readable(cu_seqlens)) return positions;
  return or_none(positions, documents_fit(boundaries, total, 1));
}

Tensor compute_documents(const Tensor& documents) {
  dispatcher::check_integers(documents, "documents");
  TORCH_CHECK_VALUE(documents.dim() >= 1, "documents: expected [..., seq], got []");
  const Tensor index = at::ones_like(documents, at::kLong).cumsum(-1) - 1;
  const Tensor before = documents.roll(1, -1);
  // The first token's neighbour is the last one, but its index is 0 either way.
  const Tensor start = std::get<0>((index * documents.ne(before)).cummax(-1));
  return (index - start).masked_fill(documents.lt(0), -1);
}

std::tuple<Tensor, Tensor, Tensor> compute_zigzag(const Tensor& cu_seqlens, int64_t rank,
                                                  int64_t world_size, MaybeSize num_tokens) {
  dispatcher::check_boundaries(cu_seqlens);
  dispatcher::check_at_least(world_size, 1, "world_size");
  dispatcher::check_length(world_size, "world_size");
  TORCH_CHECK_VALUE(rank >= 0 && rank < world_size, "rank: expected 0 to ", world_size - 1,
                    ", got ", rank);
  const c10::SymInt total = total_of(cu_seqlens, num_tokens);
  if (readable(cu_seqlens)) check_documents(cu_seqlens, total.expect_int(), 2 * world_size);
  const Tensor boundaries = cu_seqlens.to(at::kLong), own = boundaries.div(world_size, "floor");
  const Tensor tokens = at::arange(total / world_size, whole(cu_seqlens.device()));
  const Tensor document = documents_of(own, tokens);
  const Tensor index = tokens - own.index_select(0, document);
  // A last entry for tokens beyond the documents, where boundaries do not fit.
  const Tensor lengths = at::constant_pad_nd(own.diff(), {0, 1}, 0);
  const Tensor chunk = lengths.index_select(0, document).div(2, "floor");
  const Tensor chunks_before =
      at::where(index < chunk, at::Scalar(rank), at::Scalar(2 * world_size - 2 - rank));
  Tensor positions = index + chunk * chunks_before;
  Tensor indices = positions + boundaries.index_select(0, document);
  if (!readable(cu_seqlens)) {
    const Tensor fit = documents_fit(boundaries, total, 2 * world_size);
    positions = or_none(positions, fit);
    indices = or_none(indices, fit);
  }
  return {indices, positions, own.to(cu_seqlens.scalar_type())};
}

}  // namespace

void check_order(Text order) {
  bool known = !order.empty();
  for (size_t i = 0; i < order.size(); ++i) {
    known = known && axis_names.find(order[i]) != Text::npos && order.rfind(order[i]) == i;
  }
  TORCH_CHECK_VALUE(known, "order: expected 't', 'h' and 'w', each at most once, got '",
                    core::brief(order), "'");
}

TORCH_LIBRARY_IMPL(posembed, CompositeExplicitAutograd, m) {
  m.impl("mrope_specification", [](Text rule) { return rule_of(rule)->to_json(); });
  m.impl("mrope_rules",
         [] { return c10::List<std::string>(at::ArrayRef<std::string>(MropeRule::names())); });
}

namespace {

// ------------------------------------------------------------------------------------------- grids
// Positions of pictures that are packed one after another: a token's index tells its picture, its
// frame, its square and its place there, so nothing loops over pictures.

/// Bool [pictures]: whole squares, and no size below 0.
Tensor whole_squares(const Tensor& sizes, int64_t merge) {
  const Tensor squares = sizes.slice(1, 1).remainder(merge).eq(0);
  return sizes.ge(0).all(1).logical_and(squares.all(1));
}

/// Checks sizes [pictures, 3] on the CPU.
void check_sizes(const Tensor& sizes, int64_t merge, const Tensor& tokens, int64_t total) {
  const Tensor odd = whole_squares(sizes, merge).logical_not();
  if (odd.any().item<bool>()) {
    const int64_t picture = odd.nonzero()[0].item<int64_t>();
    TORCH_CHECK_VALUE(false, "grids: expected heights and widths that merge ", merge,
                      " divides, and no size below 0, got ", sizes[picture][1].item<int64_t>(),
                      " x ", sizes[picture][2].item<int64_t>(), " for picture ", picture);
  }
  TORCH_CHECK_VALUE(countable(sizes).item<bool>(), "grids: expected fewer than 2^53 tokens");
  TORCH_CHECK_VALUE(tokens.item<int64_t>() == total, "grids: expected ", total,
                    " tokens, num_tokens, got ", tokens.item<int64_t>());
}

/// Divides whole numbers; a divisor of 0, which only an empty picture has, counts as 1.
Tensor quotient(const Tensor& a, const Tensor& b) { return a.div(b.clamp_min(1), "floor"); }

}  // namespace

void check_grids(const Tensor& grids, const char* argument) {
  dispatcher::check_integers(grids, argument);
  TORCH_CHECK_VALUE(grids.dim() == 2 && (grids.sym_size(1) == 3 || grids.sym_size(1) == 2),
                    argument, ": expected [items, 3] or [items, 2], got ", grids.sym_sizes());
}

Places places_of(const Tensor& grids, int64_t merge, const MaybeSize& num_tokens) {
  check_grids(grids, "grids");
  dispatcher::check_at_least(merge, 1, "merge");
  dispatcher::check_length(merge, "merge");
  if (num_tokens.has_value()) dispatcher::check_length(*num_tokens, "num_tokens");
  const Tensor sizes = with_time(grids).to(at::kLong);  // [pictures, 3]
  const Tensor counts = sizes.prod(1), ends = counts.cumsum(0), total = counts.sum();
  const c10::SymInt size = num_tokens.has_value() ? *num_tokens : total.item().toSymInt();
  Places places;
  if (readable(grids)) {
    check_sizes(sizes, merge, total, size.expect_int());
  } else {
    places.fit = whole_squares(sizes, merge)
                     .all()
                     .logical_and(total.eq(at::Scalar(size)))
                     .logical_and(countable(sizes));
  }
  const Tensor tokens = at::arange(size, grids.options().dtype(at::kLong));
  // Tokens beyond the last picture, where grids do not fit, count as its own.
  const Tensor picture = at::searchsorted(ends, tokens, /*out_int32=*/false, /*right=*/true)
                             .clamp_max(at::Scalar(grids.sym_size(0) - 1));
  const auto of_picture = [&](const Tensor& column) { return column.index_select(0, picture); };
  places.height = of_picture(sizes.select(1, 1));
  places.width = of_picture(sizes.select(1, 2));
  const Tensor index = tokens - of_picture(ends - counts);
  const Tensor cells = places.height * places.width;
  places.time = quotient(index, cells);
  const Tensor cell = index - places.time * cells;
  const Tensor square = cell.div(merge * merge, "floor"), within = cell.remainder(merge * merge);
  const Tensor in_a_row = places.width.div(merge, "floor"), row = quotient(square, in_a_row);
  places.row = row * merge + within.div(merge, "floor");
  places.column = (square - row * in_a_row) * merge + within.remainder(merge);
  return places;
}

namespace {

Tensor compute_packed_grids(const Tensor& grids, Text order, int64_t merge, MaybeSize num_tokens) {
  check_order(order);
  const Places places = places_of(grids, merge, num_tokens);
  std::vector<Tensor> axes;
  for (const char axis : order) {
    axes.push_back(axis == 't' ? places.time : axis == 'h' ? places.row : places.column);
  }
  const Tensor positions = at::stack(axes);
  return places.fit.defined() ? or_none(positions, places.fit) : positions;
}

// ------------------------------------------------------------------------------------------ canvas
// MiniCPM-V 4.7's canvas (OpenBMB): a picture's thumbnail is stretched over the canvas that its
// slices tile, and the markers around them have places there. What belongs to a frame, a thumbnail
// with its slices, is reduced by scatter into one entry for each.

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

namespace posembed {
namespace {

// ------------------------------------------------------------------------------------------ offset

/// Positions [tokens] that restart at each document's offset. A sequence is the whole batch.
at::Tensor positions_of_documents(const at::Tensor& cu_seqlens, const Offset& offset,
                                  const at::Tensor& x, int64_t batch, int64_t seq) {
  TORCH_CHECK_VALUE(batch < 0 || x.sym_size(batch) == 1, "cu_seqlens: expected ",
                    x.dim() > 3 ? "layout 'thd' or " : "", "batch 1, got batch ",
                    x.sym_size(std::max<int64_t>(batch, 0)));
  const at::Tensor positions =
      positions::packed_positions(cu_seqlens, x.sym_size(seq), offset.of_samples());
  return offset.of_samples().has_value() ? positions : positions + at::Scalar(offset.number());
}

}  // namespace

std::optional<at::Tensor> Offset::positions(const std::optional<at::Tensor>& given,
                                            const at::Tensor& x, int64_t batch, int64_t seq,
                                            const std::optional<at::Tensor>& cu_seqlens) const {
  const bool documents = cu_seqlens.has_value();
  if (x.dim() <= std::max(batch, seq) || !(documents || of_samples_.has_value())) return given;
  if (documents) {
    TORCH_CHECK_VALUE(!given.has_value(), "cu_seqlens: expected none where positions are given");
    return positions_of_documents(*cu_seqlens, *this, x, batch, seq);
  }
  TORCH_CHECK_VALUE(!given.has_value(), "offset: expected 0 where positions are given, got ",
                    of_samples_->sizes());
  dispatcher::check_position_integers(*of_samples_, "offset");
  TORCH_CHECK_VALUE(batch >= 0, "offset: expected a number where there is no batch, got ",
                    of_samples_->sizes());
  TORCH_CHECK_VALUE(of_samples_->dim() == 1 && of_samples_->size(0) == x.size(batch),
                    "offset: expected a number or [batch] with batch ", x.size(batch), ", got ",
                    of_samples_->sizes());
  return of_samples_->unsqueeze(-1) + at::arange(x.size(seq), of_samples_->options());
}

const char* name(AdditiveLayout layout) { return layout == AdditiveLayout::bsd ? "bsd" : "sbd"; }

PositionCall PositionCall::sequence_first(const at::Tensor& x) const {
  std::optional<at::Tensor> own =
      offset_.positions(positions_, x, /*batch=*/1, /*seq=*/0, cu_seqlens_);
  const c10::SymInt seq = x.sym_size(0), batch = x.sym_size(1);
  if (!own.has_value()) {
    const auto options = x.options().dtype(at::kLong);
    own = at::arange(offset_.number(), offset_.number() + seq, options);
  } else {
    const bool counted = offset_.of_samples().has_value() || cu_seqlens_.has_value();
    TORCH_CHECK_VALUE(counted || offset_.number() == 0,
                      "offset: expected 0 where positions are given, got ", offset_.number());
  }
  const bool fits = own->dim() >= 1 && own->dim() <= 2 && own->sym_size(-1) == seq &&
                    (own->dim() == 1 || own->sym_size(0) == 1 || own->sym_size(0) == batch);
  TORCH_CHECK_VALUE(fits, "positions: expected [", seq, "] or [", batch, ", ", seq,
                    "] for x [seq, batch, dim], got ", own->sym_sizes());
  const at::Tensor rows = own->dim() == 1 ? own->unsqueeze(1) : own->t();
  return PositionCall(rows.expand_symint({seq, batch})).grid(grid_);
}

}  // namespace posembed

namespace posembed::positions {

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  define(m,
         "mrope_positions("
         "Tensor ids, "
         "str rule, "
         "Tensor? image_grids=None, "
         "Tensor? video_grids=None, "
         "Tensor? seconds_per_grid=None, "
         "Tensor? audio_lengths=None, "
         "Tensor? attention_mask=None, "
         "Tensor? token_types=None) -> (Tensor, Tensor)");
  define(m, "mrope_specification(str rule) -> str");
  define(m, "mrope_rules() -> str[]");
  define(m,
         "grid_positions("
         "SymInt frames, "
         "SymInt height, "
         "SymInt width, "
         "bool centred=False, "
         "float[] scale=[], "
         "float[] offset=[], "
         "str order=\"thw\", "
         "SymInt merge=1, "
         "Device? device=None) -> Tensor");
  define(m,
         "packed_grid_positions("
         "Tensor grids, "
         "str order=\"hw\", "
         "int merge=1, "
         "SymInt? num_tokens=None) -> Tensor");
  define(m,
         "packed_positions("
         "Tensor cu_seqlens, "
         "SymInt? num_tokens=None, "
         "Tensor? offset=None) -> Tensor");
  define(m, "document_positions(Tensor documents) -> Tensor");
  define(m,
         "zigzag_positions("
         "Tensor cu_seqlens, "
         "int rank, "
         "int world_size, "
         "SymInt? num_tokens=None) -> (Tensor, Tensor, Tensor)");
  grid_positions.compose<compute_grid>(m);
  packed_positions.compose<compute_packed>(m);
  document_positions.compose_batched<compute_documents>(m);
  zigzag_positions.compose<compute_zigzag>(m);
  packed_grid_positions.compose<compute_packed_grids>(m);
}

}  // namespace posembed::positions
