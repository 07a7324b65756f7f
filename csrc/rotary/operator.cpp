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

void rotate(const Job& job, const Rotation& rotation, const Specification& spec) {
  const int64_t tokens = job.in[0]->size(dimensions(rotation.call.layout()).seq);
  const Inputs inputs = checked_inputs(rotation.call, tokens);
  Arguments call = arguments(job, inputs, rotation, spec);
  AngleTables tables;
  if (spec.spec.numerics != Numerics::exact) tables = use_tables(spec, *job.in[0], inputs, &call);
  launch_rotation(call, *job.in[0]);
}

/// The specification of a rotation, and memory for its results.
template <typename Result>
struct Prepared {
  SpecificationPointer spec;
  Result result;
};

Prepared<Tensor> prepare(const Tensor& query, const Rotation& rotation) {
  return {check(query, nullptr, rotation), empty_result(query)};
}

void rotate_one(const Tensor& query, const Rotation& rotation, const Prepared<Tensor>& prepared) {
  const Tensor in = dispatcher::with_contiguous_last_dim(query);
  rotate({{&in, nullptr}, {&prepared.result, nullptr}, 1}, rotation, *prepared.spec);
}

Prepared<Two> prepare_pair(const Tensor& query, const Tensor& key, const Rotation& rotation) {
  return {check(query, &key, rotation), {empty_result(query), empty_result(key)}};
}

void rotate_pair(const Tensor& query, const Tensor& key, const Rotation& rotation,
                 const Prepared<Two>& prepared) {
  const Tensor query_in = dispatcher::with_contiguous_last_dim(query);
  const Tensor key_in = dispatcher::with_contiguous_last_dim(key);
  const auto& [query_out, key_out] = prepared.result;
  rotate({{&query_in, &key_in}, {&query_out, &key_out}, 2}, rotation, *prepared.spec);
}

SpecificationPointer check_in_place(const Tensor& query, const Rotation& rotation) {
  SpecificationPointer spec = check(query, nullptr, rotation);
  dispatcher::check_writable(query, "query");
  return spec;
}

void rotate_in_place(const Tensor& query, const Rotation& rotation,
                     const SpecificationPointer& spec) {
  rotate({{&query, nullptr}, {&query, nullptr}, 1}, rotation, *spec);
}

SpecificationPointer check_pair_in_place(const Tensor& query, const Tensor& key,
                                         const Rotation& rotation) {
  SpecificationPointer spec = check(query, &key, rotation);
  dispatcher::check_writable(query, "query");
  dispatcher::check_writable(key, "key");
  return spec;
}

void rotate_pair_in_place(const Tensor& query, const Tensor& key, const Rotation& rotation,
                          const SpecificationPointer& spec) {
  dispatcher::check_no_overlap(key, "key", query, "query");
  rotate({{&query, &key}, {&query, &key}, 2}, rotation, *spec);
}

SpecificationPointer check_out(const Tensor& out, const Tensor& query, const Rotation& rotation) {
  SpecificationPointer spec = check(query, nullptr, rotation);
  dispatcher::check_like(out, "out", query, "query");
  dispatcher::check_writable(out, "out");
  return spec;
}

void rotate_out(const Tensor& out, const Tensor& query, const Rotation& rotation,
                const SpecificationPointer& spec) {
  dispatcher::check_no_overlap_or_same(out, "out", query, "query");
  const Tensor in = dispatcher::with_contiguous_last_dim(query);
  rotate({{&in, nullptr}, {&out, nullptr}, 1}, rotation, *spec);
}

SpecificationPointer check_pair_out(const Tensor& query_out, const Tensor& key_out,
                                    const Tensor& query, const Tensor& key,
                                    const Rotation& rotation) {
  SpecificationPointer spec = check(query, &key, rotation);
  dispatcher::check_like(query_out, "query_out", query, "query");
  dispatcher::check_like(key_out, "key_out", key, "key");
  dispatcher::check_writable(query_out, "query_out");
  dispatcher::check_writable(key_out, "key_out");
  return spec;
}

void rotate_pair_out(const Tensor& query_out, const Tensor& key_out, const Tensor& query,
                     const Tensor& key, const Rotation& rotation,
                     const SpecificationPointer& spec) {
  check_pair_memory(query_out, key_out, query, key);
  const Tensor query_in = dispatcher::with_contiguous_last_dim(query);
  const Tensor key_in = dispatcher::with_contiguous_last_dim(key);
  rotate({{&query_in, &key_in}, {&query_out, &key_out}, 2}, rotation, *spec);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  rotary.implement<prepare, rotate_one>(m);
  rotary_pair.implement<prepare_pair, rotate_pair>(m);
  rotary_.implement<check_in_place, rotate_in_place>(m);
  rotary_pair_.implement<check_pair_in_place, rotate_pair_in_place>(m);
  rotary_out.implement<check_out, rotate_out>(m);
  rotary_pair_out.implement<check_pair_out, rotate_pair_out>(m);
}

}  // namespace posembed::rotary
