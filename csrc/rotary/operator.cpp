// The rotary operators: query, or query and key, rotated by position; functional, in place, and
// into given memory. Eager and Meta kernels share their checks.
#include "rotary/operator.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "dispatcher/checks.h"
#include "dispatcher/cuda_scope.h"
#include "dispatcher/launch.h"
#include "dispatcher/memory_checks.h"
#include "rotary/arguments.h"
#include "rotary/frequency_gradient.h"
#include "rotary/numerics.h"

namespace posembed::rotary {
namespace {

// ------------------------------------------------------------------------------------ the kernel

void launch(Arguments& call, const Tensor& query) {
  call.error = dispatcher::device_error(query.device());
  const int64_t heads = call.rows[0].heads + (call.count > 1 ? call.rows[1].heads : 0);
  const int64_t token_bytes = 2 * heads * call.head_dim * core::size_of(call.scalar);
  dispatcher::launch(call, query, call.batch * call.seq, token_bytes, rotate_cpu,
                     POSEMBED_CUDA_LAUNCHER(rotate_cuda));
}

void rotate(const Job& job, const Rotation& by) {
  const Specification& spec = specification(by.spec);
  const Inputs inputs = checked_inputs(by, job.in[0]->size(dimensions(by.layout).seq));
  Arguments call = arguments(job, inputs, by);
  AngleTables tables;
  if (spec.spec.numerics != Numerics::exact) tables = use_tables(spec, *job.in[0], inputs, &call);
  launch(call, *job.in[0]);
}

Tensor rotary(const Tensor& query, const Rotation& by) {
  check(query, nullptr, by);
  const Tensor in = dispatcher::with_dense_rows(query);
  Tensor out = empty_result(query);
  rotate({{&in, nullptr}, {&out, nullptr}, 1}, by);
  return out;
}

std::tuple<Tensor, Tensor> rotary_pair(const Tensor& query, const Tensor& key, const Rotation& by) {
  check(query, &key, by);
  const Tensor query_in = dispatcher::with_dense_rows(query);
  const Tensor key_in = dispatcher::with_dense_rows(key);
  Tensor query_out = empty_result(query);
  Tensor key_out = empty_result(key);
  rotate({{&query_in, &key_in}, {&query_out, &key_out}, 2}, by);
  return {query_out, key_out};
}

void rotary_in_place(const Tensor& query, const Rotation& by) {
  check(query, nullptr, by);
  dispatcher::check_writable(query, "query");
  rotate({{&query, nullptr}, {&query, nullptr}, 1}, by);
}

void rotary_pair_in_place(const Tensor& query, const Tensor& key, const Rotation& by) {
  check(query, &key, by);
  dispatcher::check_writable(query, "query");
  dispatcher::check_writable(key, "key");
  dispatcher::check_apart(key, "key", query, "query");
  rotate({{&query, &key}, {&query, &key}, 2}, by);
}

void rotary_out(const Tensor& out, const Tensor& query, const Rotation& by) {
  check(query, nullptr, by);
  dispatcher::check_like(out, "out", query, "query");
  dispatcher::check_writable(out, "out");
  dispatcher::check_apart_or_same(out, "out", query, "query");
  const Tensor in = dispatcher::with_dense_rows(query);
  rotate({{&in, nullptr}, {&out, nullptr}, 1}, by);
}

void rotary_pair_out(const Tensor& query_out, const Tensor& key_out, const Tensor& query,
                     const Tensor& key, const Rotation& by) {
  check(query, &key, by);
  dispatcher::check_like(query_out, "query_out", query, "query");
  dispatcher::check_like(key_out, "key_out", key, "key");
  dispatcher::check_writable(query_out, "query_out");
  dispatcher::check_writable(key_out, "key_out");
  dispatcher::check_apart(key_out, "key_out", query_out, "query_out");
  dispatcher::check_apart(query_out, "query_out", key, "key");
  dispatcher::check_apart(key_out, "key_out", query, "query");
  dispatcher::check_apart_or_same(query_out, "query_out", query, "query");
  dispatcher::check_apart_or_same(key_out, "key_out", key, "key");
  const Tensor query_in = dispatcher::with_dense_rows(query);
  const Tensor key_in = dispatcher::with_dense_rows(key);
  rotate({{&query_in, &key_in}, {&query_out, &key_out}, 2}, by);
}

// ----------------------------------------------------------------------- derivatives by frequency

void check_tangent(const Tensor& rotated, const Rotation& by) {
  check(rotated, nullptr, by);
  TORCH_CHECK_VALUE(by.frequencies.has_value(),
                    "frequencies: expected the direction in which frequencies move, got None");
}

Tensor rotary_tangent(const Tensor& rotated, const Rotation& by) {
  check_tangent(rotated, by);
  const Tensor in = dispatcher::with_dense_rows(rotated);
  Tensor out = empty_result(rotated).zero_();
  const Inputs inputs = checked_inputs(by, in.size(dimensions(by.layout).seq));
  Arguments call = arguments({{&in, nullptr}, {&out, nullptr}, 1}, inputs, by);
  call.tangent = true;
  call.amplitude = 1;
  call.decay = nullptr;
  launch(call, in);
  return out;
}

void check_frequencies_backward(const Tensor& gradient, const Tensor& query, const Rotation& by) {
  check(query, nullptr, by);
  dispatcher::check_like(gradient, "gradient", query, "query");
}

Tensor empty_frequencies(const Tensor& query, const Rotation& by) {
  const bool wide = query.scalar_type() == at::kDouble;
  const at::ScalarType type = by.frequencies ? by.frequencies->scalar_type()
                              : wide         ? at::kDouble
                                             : at::kFloat;
  return at::empty({specification(by.spec).spec.rotary_dim / 2}, query.options().dtype(type));
}

void sum_on_cpu(const Arguments& call, const Tensor& sums, const Tensor& out) {
  double* const parts = sums.mutable_data_ptr<double>();
  const int64_t tokens = call.batch * call.seq, pairs = call.pairs;
  const int64_t token_bytes = 2 * call.rows[0].heads * call.head_dim * core::size_of(call.scalar);
  dispatcher::parallel_for(
      sums.size(0), tokens_of_chunk(tokens) * token_bytes,
      [&](int64_t begin, int64_t end) { sum_moments_cpu(call, parts, begin, end); });
  core::visit_scalar(dispatcher::scalar_of(out), [&](auto tag) {
    using Out = core::Compute<typename decltype(tag)::type>;
    Out* const results = static_cast<Out*>(out.mutable_data_ptr());
    for (int64_t i = 0; i < pairs; ++i) {
      results[i] = static_cast<Out>(total_of(parts, sums.size(0), pairs, i));
    }
  });
}

Tensor rotary_frequencies_backward(const Tensor& gradient, const Tensor& query,
                                   const Rotation& by) {
  check_frequencies_backward(gradient, query, by);
  const Tensor in = dispatcher::with_dense_rows(query),
               dense = dispatcher::with_dense_rows(gradient);
  const Inputs inputs = checked_inputs(by, in.size(dimensions(by.layout).seq));
  const Arguments call = arguments({{&in, &dense}, {}, 2}, inputs, by);
  Tensor out = empty_frequencies(query, by);
  const Tensor sums =
      at::empty({chunks_of(call.batch * call.seq), call.pairs}, query.options().dtype(at::kDouble));
  if (dispatcher::on_cuda(query)) {
    if constexpr (core::built_with_cuda) {
      const dispatcher::CudaScope scope(query);
      dispatcher::check_launch(sum_moments_cuda(call, sums.mutable_data_ptr<double>(),
                                                out.mutable_data_ptr(), dispatcher::scalar_of(out),
                                                scope.stream()));
    }
  } else {
    sum_on_cpu(call, sums, out);
  }
  return out;
}

// ------------------------------------------------------------------------------------------ Meta

Tensor rotary_meta(const Tensor& query, const Rotation& by) {
  check(query, nullptr, by);
  return empty_result(query);
}

std::tuple<Tensor, Tensor> rotary_pair_meta(const Tensor& query, const Tensor& key,
                                            const Rotation& by) {
  check(query, &key, by);
  return {empty_result(query), empty_result(key)};
}

void rotary_in_place_meta(const Tensor& query, const Rotation& by) { check(query, nullptr, by); }

void rotary_pair_in_place_meta(const Tensor& query, const Tensor& key, const Rotation& by) {
  check(query, &key, by);
}

void rotary_out_meta(const Tensor& out, const Tensor& query, const Rotation& by) {
  check(query, nullptr, by);
  dispatcher::check_like(out, "out", query, "query");
}

void rotary_pair_out_meta(const Tensor& query_out, const Tensor& key_out, const Tensor& query,
                          const Tensor& key, const Rotation& by) {
  check(query, &key, by);
  dispatcher::check_like(query_out, "query_out", query, "query");
  dispatcher::check_like(key_out, "key_out", key, "key");
}

Tensor rotary_tangent_meta(const Tensor& rotated, const Rotation& by) {
  check_tangent(rotated, by);
  return empty_result(rotated);
}

Tensor rotary_frequencies_backward_meta(const Tensor& gradient, const Tensor& query,
                                        const Rotation& by) {
  check_frequencies_backward(gradient, query, by);
  return empty_frequencies(query, by);
}

Tensor rotary_frequencies(Text text, std::optional<at::Device> device) {
  const Specification& found = specification(text);
  Tensor result = at::empty({static_cast<int64_t>(found.frequencies.size())}, at::kDouble);
  double* value = result.mutable_data_ptr<double>();
  for (const core::DoubleDouble& frequency : found.frequencies) *value++ = frequency.high;
  return result.to(device.value_or(at::kCPU));
}

double rotary_attention_factor(Text text) { return specification(text).attention_factor; }

std::string rotary_specification(Text text) { return specification(text).spec.to_json(); }

std::string rotary_resolve(Text text, int64_t seq_len) {
  return specification(text).spec.resolve(seq_len).to_json();
}

std::string rotary_for_keys(Text text) { return specification(text).for_keys; }

std::string rotary_description(Text text) { return specification(text).spec.describe(); }

std::string rotary_explanation(Text text, std::optional<int64_t> seq_len) {
  return specification(text).spec.explain(seq_len);
}

std::string rotary_difference(Text text, Text other) {
  return specification(text).spec.diff(specification(other).spec);
}

Tensor rotary_wavelengths(Text text, std::optional<at::Device> device) {
  return specification(text).spec.wavelengths().to(device.value_or(at::kCPU));
}

std::vector<int64_t> rotary_sections(at::IntArrayRef sizes, bool interleaved) {
  return Sections::of(sizes.vec(), interleaved).axis_of_pair;
}

void register_kernels(torch::Library& m) {
  m.impl("rotary", Rotary::kernel<rotary>);
  m.impl("rotary_pair", RotaryPair::kernel<rotary_pair>);
  m.impl("rotary_", RotaryInPlace::kernel<rotary_in_place>);
  m.impl("rotary_pair_", RotaryPairInPlace::kernel<rotary_pair_in_place>);
  m.impl("rotary_out", RotaryOut::kernel<rotary_out>);
  m.impl("rotary_pair_out", RotaryPairOut::kernel<rotary_pair_out>);
  m.impl("rotary_tangent", Rotary::kernel<rotary_tangent>);
  m.impl("rotary_frequencies_backward",
         RotaryFrequenciesBackward::kernel<rotary_frequencies_backward>);
}

}  // namespace

TORCH_LIBRARY_IMPL(posembed, CPU, m) { register_kernels(m); }

#if defined(POSEMBED_WITH_CUDA)
TORCH_LIBRARY_IMPL(posembed, CUDA, m) { register_kernels(m); }
#endif

TORCH_LIBRARY_IMPL(posembed, Meta, m) {
  m.impl("rotary", Rotary::kernel<rotary_meta>);
  m.impl("rotary_pair", RotaryPair::kernel<rotary_pair_meta>);
  m.impl("rotary_", RotaryInPlace::kernel<rotary_in_place_meta>);
  m.impl("rotary_pair_", RotaryPairInPlace::kernel<rotary_pair_in_place_meta>);
  m.impl("rotary_out", RotaryOut::kernel<rotary_out_meta>);
  m.impl("rotary_pair_out", RotaryPairOut::kernel<rotary_pair_out_meta>);
  m.impl("rotary_tangent", Rotary::kernel<rotary_tangent_meta>);
  m.impl("rotary_frequencies_backward",
         RotaryFrequenciesBackward::kernel<rotary_frequencies_backward_meta>);
}

TORCH_LIBRARY_IMPL(posembed, CompositeExplicitAutograd, m) {
  m.impl("rotary_frequencies", rotary_frequencies);
  m.impl("rotary_attention_factor", rotary_attention_factor);
  m.impl("rotary_specification", rotary_specification);
  m.impl("rotary_resolve", rotary_resolve);
  m.impl("rotary_for_keys", rotary_for_keys);
  m.impl("rotary_description", rotary_description);
  m.impl("rotary_explanation", rotary_explanation);
  m.impl("rotary_difference", rotary_difference);
  m.impl("rotary_wavelengths", rotary_wavelengths);
  m.impl("rotary_sections", rotary_sections);
}

}  // namespace posembed::rotary
