// The rotary operators: query, or query and key, rotated by position; functional and in place.
// Shapes are checked in one place for eager and Meta kernels; the arithmetic is the kernel's.
#include "rotary/operator.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "dispatcher/cuda_scope.h"
#include "dispatcher/parallel.h"
#include "rotary/arguments.h"
#include "rotary/json.h"

namespace posembed::rotary {
namespace {

// ------------------------------------------------------------------------------------ the kernel

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
  launch(arguments(job, checked_positions(positions), specification(text), dimensions(layout),
                   offset, inverse, transpose),
         *job.in[0]);
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
  check_apart(key, "key", query, "query");
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

std::string rotary_description(Text text) { return describe(specification(text).spec); }

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
  m.impl("rotary_sections", rotary_sections);
}

}  // namespace posembed::rotary
