#include "rotary/arguments.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "dispatcher/checks.h"

namespace posembed::rotary {
namespace {

/// A tensor has whole heads, or the rotated window alone.
void check_head_dim(const Tensor& tensor, const char* argument, const RotarySpec& spec) {
  const c10::SymInt head_dim = tensor.sym_size(-1);
  TORCH_CHECK_VALUE(head_dim == spec.head_dim || head_dim == spec.rotary_dim, argument,
                    ": expected head_dim ", spec.head_dim, ", or ", spec.rotary_dim,
                    " for the rotated window alone, got ", head_dim);
}

void check_query(const Tensor& query, const Dimensions& where, const RotarySpec& spec) {
  dispatcher::check_floating(query, "query");
  dispatcher::check_rank(query, "query", where.rank, where.shape);
  check_head_dim(query, "query", spec);
}

/// Whether positions have a row for each axis: one dimension more than [batch, seq] or [tokens].
bool has_axes(const Tensor& positions, const Dimensions& where) {
  return positions.dim() == (where.batch < 0 ? 2 : 3);
}

void check_positions(const Tensor& all, const Tensor& query, const Dimensions& where, int64_t axes,
                     const c10::SymInt& offset) {
  // positions: [seq], [batch, seq] or [1, seq]; with an axis for each section before them
  const bool by_axis = axes > 1 && has_axes(all, where);
  if (by_axis) dispatcher::check_size(all.sym_size(0), axes, "positions", "axes");
  const Tensor positions = by_axis ? all.select(0, 0) : all;
  dispatcher::check_integers(positions, "positions");
  dispatcher::check_same_device(positions, "positions", query, "query");
  const bool one_row = positions.dim() == 1;
  TORCH_CHECK_VALUE(one_row || (positions.dim() == 2 && where.batch >= 0),
                    "positions: expected [seq]", where.batch >= 0 ? " or [batch, seq]" : "",
                    ", got ", positions.sym_sizes());
  dispatcher::check_size(positions.sym_size(-1), query.sym_size(where.seq), "positions", "seq");
  TORCH_CHECK_VALUE(
      one_row || positions.sym_size(0) == query.sym_size(where.batch) || positions.sym_size(0) == 1,
      "positions: expected batch ", query.sym_size(where.batch), " or 1, got ",
      positions.sym_size(0));
  TORCH_CHECK_VALUE(offset == 0, "offset: expected 0 where positions are given, got ", offset);
}

void check_key(const Tensor& key, const Tensor& query, const Dimensions& where,
               const RotarySpec& spec) {
  dispatcher::check_rank(key, "key", where.rank, where.shape);
  check_head_dim(key, "key", spec);
  dispatcher::check_same_dtype(key, "key", query, "query");
  dispatcher::check_same_device(key, "key", query, "query");
  dispatcher::check_size(key.sym_size(where.seq), query.sym_size(where.seq), "key", "seq");
  if (where.batch >= 0) {
    dispatcher::check_size(key.sym_size(where.batch), query.sym_size(where.batch), "key", "batch");
  }
}

void check_position_values(const Tensor& positions) {
  const core::IndexView view = dispatcher::index_view(positions);
  for (int64_t place = 0; place < positions.numel(); ++place) {
    const int64_t position = core::read(view, place);
    TORCH_CHECK_INDEX(position >= -1, "positions: expected -1 (leave the token as it is) or more, ",
                      "got ", position, " at place ", place);
  }
}

}  // namespace

Dimensions dimensions(Text layout) {
  if (layout == "bshd") return {4, 0, 1, 2, "[batch, seq, heads, head_dim]"};
  if (layout == "bhsd") return {4, 0, 2, 1, "[batch, heads, seq, head_dim]"};
  if (layout == "sbhd") return {4, 1, 0, 2, "[seq, batch, heads, head_dim]"};
  if (layout == "thd") return {3, -1, 0, 1, "[tokens, heads, head_dim]"};
  TORCH_CHECK_VALUE(false, "layout: expected 'bshd', 'bhsd', 'sbhd' or 'thd', got '", layout, "'");
}

void check(const Tensor& query, const Tensor* key, const MaybeTensor& positions, Text text,
           Text layout, const c10::SymInt& offset) {
  const Specification& found = specification(text);
  const RotarySpec& spec = found.spec;
  TORCH_CHECK_VALUE(!spec.is_dynamic(),
                    "spec: its frequencies depend on the length of the sequence, which the ",
                    "operator does not know: pass seq_len, or resolve(seq_len) of it");
  const Dimensions where = dimensions(layout);
  check_query(query, where, spec);
  if (key != nullptr) check_key(*key, query, where, spec);
  TORCH_CHECK_VALUE(offset >= 0, "offset: expected 0 or more, got ", offset);
  if (positions.has_value()) check_positions(*positions, query, where, found.axes, offset);
}

Tensor checked_positions(const MaybeTensor& positions) {
  if (!positions.has_value()) return {};
  if (positions->is_cuda()) return *positions;
  const Tensor result = positions->contiguous();
  check_position_values(result);
  return result;
}

Rows rows(const Tensor& in, const Tensor& out, const Dimensions& where) {
  Rows result;
  result.in = in.const_data_ptr();
  result.out = out.mutable_data_ptr();
  result.heads = in.size(where.heads);
  const int64_t order[3] = {where.batch, where.seq, where.heads};
  for (int i = 0; i < 3; ++i) {
    result.in_stride[i] = order[i] < 0 ? 0 : in.stride(order[i]);
    result.out_stride[i] = order[i] < 0 ? 0 : out.stride(order[i]);
  }
  return result;
}

Arguments arguments(const Job& job, const Tensor& positions, const Specification& spec,
                    const Dimensions& where, int64_t offset, bool inverse, bool transpose) {
  const Tensor& query = *job.in[0];
  Arguments result;
  result.count = job.count;
  for (int64_t i = 0; i < job.count; ++i) {
    result.rows[i] = rows(*job.in[i], *job.out[i], where);
    result.rows[i].window_only = job.in[i]->size(-1) != spec.spec.head_dim;
  }
  result.scalar = dispatcher::scalar_of(query);
  result.batch = where.batch < 0 ? 1 : query.size(where.batch);
  result.seq = query.size(where.seq);
  result.head_dim = spec.spec.head_dim;
  result.pairs = spec.spec.rotary_dim / 2;
  result.start = spec.spec.rotary_start;
  result.interleaved = spec.spec.interleaved;
  result.reverse = (inverse != transpose) != spec.spec.reverse;
  result.turns = spec.turns.data();
  result.amplitude = inverse ? 1.0 / spec.attention_factor : spec.attention_factor;
  result.offset = offset;
  if (positions.defined()) {
    result.positions = dispatcher::index_view(positions);
    const bool by_row = where.batch >= 0 && positions.dim() > 1 && positions.size(-2) > 1;
    result.position_stride[0] = by_row ? positions.stride(-2) : 0;
    result.position_stride[1] = positions.stride(-1);
    if (has_axes(positions, where)) {
      result.position_stride[2] = positions.stride(0);
      result.axes = spec.axes;
      result.axis_of_pair = spec.axis_of_pair.data();
    }
  }
  return result;
}

Tensor empty_result(const Tensor& input) {
  Tensor result = at::empty_like(input);
  const bool dense = input.sym_size(-1) <= 1 || result.sym_stride(-1) == 1;
  return dense ? result : at::empty_symint(input.sym_sizes(), input.options());
}

Tensor with_dense_rows(const Tensor& tensor) {
  return tensor.size(-1) <= 1 || tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

void check_writable(const Tensor& tensor, const char* argument) {
  TORCH_CHECK_VALUE(tensor.size(-1) <= 1 || tensor.stride(-1) == 1, argument,
                    ": expected a contiguous last dimension, got strides ", tensor.strides());
  TORCH_CHECK_VALUE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, argument,
                    ": expected elements that do not share memory, got strides ", tensor.strides());
}

void check_apart(const Tensor& tensor, const char* argument, const Tensor& other,
                 const char* other_argument) {
  if (tensor.numel() == 0 || other.numel() == 0) return;
  const at::MemOverlapStatus overlap = at::get_overlap_status(tensor, other);
  TORCH_CHECK_VALUE(
      overlap != at::MemOverlapStatus::Full && overlap != at::MemOverlapStatus::Partial, argument,
      ": expected memory apart from ", other_argument, "'s, got tensors that overlap");
}

}  // namespace posembed::rotary
