// The rotary operators: query, or query and key, rotated by position; functional, in place, and
// into given memory. Eager and Meta kernels share their checks.
#include "rotary/operator.h"

#include <torch/library.h>

#include "dispatcher/checks.h"
#include "dispatcher/memory_checks.h"
#include "rotary/arguments.h"
#include "rotary/numerics.h"

namespace posembed::rotary {
namespace {

void rotate(const Job& job, const Rotation& by, const Specification& spec) {
  const int64_t tokens = job.in[0]->size(dimensions(by.call.layout()).seq);
  const Inputs inputs = checked_inputs(by.call, tokens);
  Arguments call = arguments(job, inputs, by, spec);
  AngleTables tables;
  if (spec.spec.numerics != Numerics::exact) tables = use_tables(spec, *job.in[0], inputs, &call);
  launch_rotation(call, *job.in[0]);
}

Tensor rotary(const Tensor& query, const Rotation& by) {
  const SpecificationPointer spec = check(query, nullptr, by);
  const Tensor in = dispatcher::with_contiguous_last_dim(query);
  Tensor out = empty_result(query);
  rotate({{&in, nullptr}, {&out, nullptr}, 1}, by, *spec);
  return out;
}

std::tuple<Tensor, Tensor> rotary_pair(const Tensor& query, const Tensor& key, const Rotation& by) {
  const SpecificationPointer spec = check(query, &key, by);
  const Tensor query_in = dispatcher::with_contiguous_last_dim(query);
  const Tensor key_in = dispatcher::with_contiguous_last_dim(key);
  Tensor query_out = empty_result(query);
  Tensor key_out = empty_result(key);
  rotate({{&query_in, &key_in}, {&query_out, &key_out}, 2}, by, *spec);
  return {query_out, key_out};
}

void rotary_in_place(const Tensor& query, const Rotation& by) {
  const SpecificationPointer spec = check(query, nullptr, by);
  dispatcher::check_writable(query, "query");
  rotate({{&query, nullptr}, {&query, nullptr}, 1}, by, *spec);
}

void rotary_pair_in_place(const Tensor& query, const Tensor& key, const Rotation& by) {
  const SpecificationPointer spec = check(query, &key, by);
  dispatcher::check_writable(query, "query");
  dispatcher::check_writable(key, "key");
  dispatcher::check_no_overlap(key, "key", query, "query");
  rotate({{&query, &key}, {&query, &key}, 2}, by, *spec);
}

void rotary_out(const Tensor& out, const Tensor& query, const Rotation& by) {
  const SpecificationPointer spec = check(query, nullptr, by);
  dispatcher::check_like(out, "out", query, "query");
  dispatcher::check_writable(out, "out");
  dispatcher::check_no_overlap_or_same(out, "out", query, "query");
  const Tensor in = dispatcher::with_contiguous_last_dim(query);
  rotate({{&in, nullptr}, {&out, nullptr}, 1}, by, *spec);
}

void rotary_pair_out(const Tensor& query_out, const Tensor& key_out, const Tensor& query,
                     const Tensor& key, const Rotation& by) {
  const SpecificationPointer spec = check(query, &key, by);
  dispatcher::check_like(query_out, "query_out", query, "query");
  dispatcher::check_like(key_out, "key_out", key, "key");
  check_pair_memory(query_out, key_out, query, key);
  const Tensor query_in = dispatcher::with_contiguous_last_dim(query);
  const Tensor key_in = dispatcher::with_contiguous_last_dim(key);
  rotate({{&query_in, &key_in}, {&query_out, &key_out}, 2}, by, *spec);
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

void register_kernels(torch::Library& m) {
  m.impl("rotary", Rotary::kernel<rotary>);
  m.impl("rotary_pair", RotaryPair::kernel<rotary_pair>);
  m.impl("rotary_", RotaryInPlace::kernel<rotary_in_place>);
  m.impl("rotary_pair_", RotaryPairInPlace::kernel<rotary_pair_in_place>);
  m.impl("rotary_out", RotaryOut::kernel<rotary_out>);
  m.impl("rotary_pair_out", RotaryPairOut::kernel<rotary_pair_out>);
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
}

}  // namespace posembed::rotary
