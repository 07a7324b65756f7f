// Positions of grids, of documents packed into one sequence, and of parts of these.
#include "positions/operator.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <array>
#include <cmath>
#include <limits>

#include "core/brief.h"
#include "dispatcher/checks.h"
#include "dispatcher/cu_seqlens.h"
#include "dispatcher/output_memory.h"
#include "positions/items.h"
#include "positions/rule.h"

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
  TORCH_CHECK_VALUE(world_size >= 1, "world_size: expected 1 or more, got ", world_size);
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

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  grid_positions.compose<compute_grid>(m);
  packed_positions.compose<compute_packed>(m);
  document_positions.compose_batched<compute_documents>(m);
  zigzag_positions.compose<compute_zigzag>(m);
}

TORCH_LIBRARY_IMPL(posembed, CompositeExplicitAutograd, m) {
  m.impl("mrope_specification", [](Text rule) { return rule_of(rule)->to_json(); });
  m.impl("mrope_rules",
         [] { return c10::List<std::string>(at::ArrayRef<std::string>(MropeRule::names())); });
}

}  // namespace posembed::positions
