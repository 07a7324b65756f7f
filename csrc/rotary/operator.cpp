// The rotary operators: query, or query and key, rotated by position; functional and in place.
// Shapes are checked in one place for eager and Meta kernels; the arithmetic is the kernel's.
#include "rotary/operator.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "dispatcher/checks.h"
#include "dispatcher/cuda_scope.h"
#include "dispatcher/parallel.h"
#include "rotary/kernel.h"
#include "rotary/specification.h"

namespace posembed::rotary {
namespace {

// ------------------------------------------------------------------------------ shapes and checks

/// Where a layout keeps its dimensions; batch -1: there is none.
struct Dimensions {
  int64_t rank, batch, seq, heads;
  const char* shape;
};

Dimensions dimensions(Text layout) {
  if (layout == "bshd") return {4, 0, 1, 2, "[batch, seq, heads, head_dim]"};
  if (layout == "bhsd") return {4, 0, 2, 1, "[batch, heads, seq, head_dim]"};
  if (layout == "sbhd") return {4, 1, 0, 2, "[seq, batch, heads, head_dim]"};
  if (layout == "thd") return {3, -1, 0, 1, "[tokens, heads, head_dim]"};
  TORCH_CHECK_VALUE(false, "layout: expected 'bshd', 'bhsd', 'sbhd' or 'thd', got '", layout, "'");
}

void check_rotated(const Tensor& tensor, const char* argument, const Dimensions& where,
                   const RotarySpec& spec) {
  dispatcher::check_floating(tensor, argument);
  dispatcher::check_rank(tensor, argument, where.rank, where.shape);
  dispatcher::check_size(tensor.sym_size(-1), spec.head_dim, argument, "head_dim");
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

void check_key(const Tensor& key, const Tensor& query, const Dimensions& where) {
  dispatcher::check_same_dtype(key, "key", query, "query");
  dispatcher::check_same_device(key, "key", query, "query");
  dispatcher::check_size(key.sym_size(where.seq), query.sym_size(where.seq), "key", "seq");
  if (where.batch >= 0) {
    dispatcher::check_size(key.sym_size(where.batch), query.sym_size(where.batch), "key", "batch");
  }
}

/// Everything that eager and Meta kernels check alike.
void check(const Tensor& query, const Tensor* key, const MaybeTensor& positions, Text text,
           Text layout, const c10::SymInt& offset) {
  const Specification& found = specification(text);
  const RotarySpec& spec = found.spec;
  TORCH_CHECK_VALUE(!spec.is_dynamic(),
                    "spec: its frequencies depend on the length of the sequence, which the ",
                    "operator does not know: pass seq_len, or resolve(seq_len) of it");
  const Dimensions where = dimensions(layout);
  check_rotated(query, "query", where, spec);
  if (key != nullptr) {
    check_rotated(*key, "key", where, spec);
    check_key(*key, query, where);
  }
  TORCH_CHECK_VALUE(offset >= 0, "offset: expected 0 or more, got ", offset);
  if (positions.has_value()) check_positions(*positions, query, where, found.axes, offset);
}

/// CPU positions are looked at before anything is written; a CUDA kernel records what it meets.
void check_position_values(const Tensor& positions) {
  const core::IndexView view = dispatcher::index_view(positions);
  for (int64_t place = 0; place < positions.numel(); ++place) {
    const int64_t position = core::read(view, place);
    TORCH_CHECK_INDEX(position >= -1, "positions: expected -1 (leave the token as it is) or more, ",
                      "got ", position, " at place ", place);
  }
}

// ------------------------------------------------------------------------------------ the kernel

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

/// What to rotate: one or two tensors, each with the place of its result.
struct Job {
  const Tensor* in[2];
  const Tensor* out[2];
  int64_t count;
};

Arguments arguments(const Job& job, const Tensor& positions, const Specification& spec,
                    const Dimensions& where, int64_t offset, bool inverse, bool transpose) {
  const Tensor& query = *job.in[0];
  Arguments result;
  result.count = job.count;
  for (int64_t i = 0; i < job.count; ++i) result.rows[i] = rows(*job.in[i], *job.out[i], where);
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

void launch(const Arguments& call, const Tensor& query) {
  if (query.is_cuda()) {
    if constexpr (core::built_with_cuda) {
      const dispatcher::CudaScope scope(query);
      Arguments on_device = call;
      on_device.error = dispatcher::device_error();
      dispatcher::check_launch(rotate_cuda(on_device, scope.stream()));
    }
    return;
  }
  const int64_t heads = call.rows[0].heads + (call.count > 1 ? call.rows[1].heads : 0);
  const int64_t token_bytes = 2 * heads * call.head_dim * core::size_of(call.scalar);
  dispatcher::parallel_for(call.batch * call.seq, token_bytes,
                           [&call](int64_t begin, int64_t end) { rotate_cpu(call, begin, end); });
}

void rotate(const Job& job, const MaybeTensor& positions, Text text, Text layout, int64_t offset,
            bool inverse, bool transpose) {
  Tensor places;
  if (positions.has_value()) {
    places = *positions;
    if (!places.is_cuda()) check_position_values(places = places.contiguous());
  }
  launch(
      arguments(job, places, specification(text), dimensions(layout), offset, inverse, transpose),
      *job.in[0]);
}

/// Strides as the input's where they leave the last dimension contiguous, which the kernel asks
/// for.
Tensor empty_result(const Tensor& input) {
  Tensor result = at::empty_like(input);
  const bool dense = input.sym_size(-1) <= 1 || result.sym_stride(-1) == 1;
  return dense ? result : at::empty_symint(input.sym_sizes(), input.options());
}

/// The kernel asks for a contiguous last dimension; gradients come expanded now and then.
Tensor with_dense_rows(const Tensor& tensor) {
  return tensor.size(-1) <= 1 || tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

Tensor rotary(const Tensor& query, const MaybeTensor& positions, Text spec, Text layout,
              int64_t offset, bool inverse, bool transpose) {
  check(query, nullptr, positions, spec, layout, offset);
  const Tensor in = with_dense_rows(query);
  Tensor out = empty_result(in);
  rotate({{&in, nullptr}, {&out, nullptr}, 1}, positions, spec, layout, offset, inverse, transpose);
  return out;
}

std::tuple<Tensor, Tensor> rotary_pair(const Tensor& query, const Tensor& key,
                                       const MaybeTensor& positions, Text spec, Text layout,
                                       int64_t offset, bool inverse, bool transpose) {
  check(query, &key, positions, spec, layout, offset);
  const Tensor query_in = with_dense_rows(query);
  const Tensor key_in = with_dense_rows(key);
  Tensor query_out = empty_result(query_in);
  Tensor key_out = empty_result(key_in);
  rotate({{&query_in, &key_in}, {&query_out, &key_out}, 2}, positions, spec, layout, offset,
         inverse, transpose);
  return {query_out, key_out};
}

void check_writable(const Tensor& tensor, const char* argument) {
  TORCH_CHECK_VALUE(tensor.size(-1) <= 1 || tensor.stride(-1) == 1, argument,
                    ": expected a contiguous last dimension, got strides ", tensor.strides());
  TORCH_CHECK_VALUE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, argument,
                    ": expected elements that do not share memory, got strides ", tensor.strides());
}

void check_apart(const Tensor& query, const Tensor& key) {
  if (query.numel() == 0 || key.numel() == 0) return;
  const at::MemOverlapStatus overlap = at::get_overlap_status(query, key);
  TORCH_CHECK_VALUE(
      overlap != at::MemOverlapStatus::Full && overlap != at::MemOverlapStatus::Partial,
      "key: expected memory apart from query's, got tensors that overlap");
}

void rotary_in_place(const Tensor& query, const MaybeTensor& positions, Text spec, Text layout,
                     int64_t offset, bool inverse) {
  check(query, nullptr, positions, spec, layout, offset);
  check_writable(query, "query");
  rotate({{&query, nullptr}, {&query, nullptr}, 1}, positions, spec, layout, offset, inverse,
         false);
}

void rotary_pair_in_place(const Tensor& query, const Tensor& key, const MaybeTensor& positions,
                          Text spec, Text layout, int64_t offset, bool inverse) {
  check(query, &key, positions, spec, layout, offset);
  check_writable(query, "query");
  check_writable(key, "key");
  check_apart(query, key);
  rotate({{&query, &key}, {&query, &key}, 2}, positions, spec, layout, offset, inverse, false);
}

// ------------------------------------------------------------------------------------------ Meta

Tensor rotary_meta(const Tensor& query, const MaybeTensor& positions, Text spec, Text layout,
                   c10::SymInt offset, bool, bool) {
  check(query, nullptr, positions, spec, layout, offset);
  return empty_result(query);
}

std::tuple<Tensor, Tensor> rotary_pair_meta(const Tensor& query, const Tensor& key,
                                            const MaybeTensor& positions, Text spec, Text layout,
                                            c10::SymInt offset, bool, bool) {
  check(query, &key, positions, spec, layout, offset);
  return {empty_result(query), empty_result(key)};
}

void rotary_in_place_meta(const Tensor& query, const MaybeTensor& positions, Text spec, Text layout,
                          c10::SymInt offset, bool) {
  check(query, nullptr, positions, spec, layout, offset);
}

void rotary_pair_in_place_meta(const Tensor& query, const Tensor& key, const MaybeTensor& positions,
                               Text spec, Text layout, c10::SymInt offset, bool) {
  check(query, &key, positions, spec, layout, offset);
}

Tensor rotary_frequencies(Text text) {
  const Specification& found = specification(text);
  Tensor result = at::empty({static_cast<int64_t>(found.frequencies.size())}, at::kDouble);
  double* value = result.mutable_data_ptr<double>();
  for (const core::DoubleDouble& frequency : found.frequencies) *value++ = frequency.high;
  return result;
}

double rotary_attention_factor(Text text) { return specification(text).attention_factor; }

std::string rotary_specification(Text text) { return specification(text).spec.to_json(); }

std::string rotary_resolve(Text text, int64_t seq_len) {
  return specification(text).spec.resolve(seq_len).to_json();
}

std::string rotary_description(Text text) { return specification(text).spec.describe(); }

std::string rotary_explanation(Text text, std::optional<int64_t> seq_len) {
  return specification(text).spec.explain(seq_len);
}

std::string rotary_difference(Text text, Text other) {
  return specification(text).spec.diff(specification(other).spec);
}

Tensor rotary_wavelengths(Text text) { return specification(text).spec.wavelengths(); }

std::vector<int64_t> rotary_sections(at::IntArrayRef sizes, bool interleaved) {
  return Sections::of(sizes.vec(), interleaved).axis_of_pair;
}

void register_kernels(torch::Library& m) {
  m.impl("rotary", rotary);
  m.impl("rotary_pair", rotary_pair);
  m.impl("rotary_", rotary_in_place);
  m.impl("rotary_pair_", rotary_pair_in_place);
}

}  // namespace

TORCH_LIBRARY_IMPL(posembed, CPU, m) { register_kernels(m); }

#if defined(POSEMBED_WITH_CUDA)
TORCH_LIBRARY_IMPL(posembed, CUDA, m) { register_kernels(m); }
#endif

TORCH_LIBRARY_IMPL(posembed, Meta, m) {
  m.impl("rotary", rotary_meta);
  m.impl("rotary_pair", rotary_pair_meta);
  m.impl("rotary_", rotary_in_place_meta);
  m.impl("rotary_pair_", rotary_pair_in_place_meta);
}

TORCH_LIBRARY_IMPL(posembed, CompositeExplicitAutograd, m) {
  m.impl("rotary_frequencies", rotary_frequencies);
  m.impl("rotary_attention_factor", rotary_attention_factor);
  m.impl("rotary_specification", rotary_specification);
  m.impl("rotary_resolve", rotary_resolve);
  m.impl("rotary_description", rotary_description);
  m.impl("rotary_explanation", rotary_explanation);
  m.impl("rotary_difference", rotary_difference);
  m.impl("rotary_wavelengths", rotary_wavelengths);
  m.impl("rotary_sections", rotary_sections);
}

}  // namespace posembed::rotary
