// The QK-norm operators: RMSNorm of each head of query and key, then rotary, in one kernel, and
// their gradients in another. Eager and Meta kernels share their checks.
#include "rotary_norm/operator.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "dispatcher/autocast.h"
#include "dispatcher/checks.h"
#include "dispatcher/cuda_scope.h"
#include "dispatcher/launch.h"
#include "dispatcher/memory_checks.h"
#include "rotary/arguments.h"
#include "rotary_norm/kernel.h"

namespace posembed::rotary_norm {
namespace {

using rotary::Dimensions;

// ------------------------------------------------------------------------------------- checks

void check_weight(const Tensor& weight, const char* argument, const Call& call) {
  dispatcher::check_rank(weight, argument, 1, "[head_dim]");
  dispatcher::check_same_dtype(weight, argument, call.query, "query");
  dispatcher::check_same_device(weight, argument, call.query, "query");
  dispatcher::check_size(weight.sym_size(0), call.query.sym_size(-1), argument, "head_dim");
}

/// The checks that need no values. Eager and Meta kernels share them.
rotary::SpecificationPointer check(const Call& call) {
  rotary::SpecificationPointer spec = rotary::check(call.query, &call.key, rotation_of(call));
  rotary::check_exact_angles(*spec, "norm_rotary");
  const int64_t head_dim = spec->spec.head_dim;
  dispatcher::check_size(call.query.sym_size(-1), head_dim, "query", "head_dim");
  dispatcher::check_size(call.key.sym_size(-1), head_dim, "key", "head_dim");
  TORCH_CHECK_VALUE(head_dim <= max_head_dim, "head_dim: expected at most ", max_head_dim, ", got ",
                    head_dim);
  check_weight(call.query_weight, "query_weight", call);
  check_weight(call.key_weight, "key_weight", call);
  dispatcher::check_eps(call.options.eps());
  TORCH_CHECK_VALUE(std::isfinite(call.options.weight_offset()),
                    "weight_offset: expected a finite number, got ", call.options.weight_offset());
  return spec;
}

// --------------------------------------------------------------------------------- the kernel

/// [batch, seq, heads] of query or key; batch is 1 for layouts without one.
c10::SymDimVector rstd_sizes(const Tensor& tensor, const Dimensions& where) {
  return {where.batch < 0 ? c10::SymInt(1) : tensor.sym_size(where.batch),
          tensor.sym_size(where.seq), tensor.sym_size(where.heads)};
}

Tensor empty_rstd(const Tensor& tensor, Layout layout) {
  return at::empty_symint(rstd_sizes(tensor, rotary::dimensions(layout)),
                          tensor.options().dtype(dispatcher::compute_type(tensor)));
}

/// The arguments as kernels read them, and the tensors that they point into.
struct Prepared {
  Arguments arguments;
  rotary::Inputs inputs;
  Tensor query, key, weight[2];
};

/// The arguments for reading rows of `in` and writing rows of `out`: query and key, or their
/// gradients.
Prepared prepare(const Call& call, const rotary::Specification& spec, const Two& in, const Two& out,
                 bool transpose) {
  Prepared prepared;
  const rotary::Rotation by = rotation_of(call, transpose);
  prepared.inputs =
      rotary::checked_inputs(by.call, call.query.size(rotary::dimensions(by.call.layout()).seq));
  prepared.query = dispatcher::with_contiguous_last_dim(std::get<0>(in));
  prepared.key = dispatcher::with_contiguous_last_dim(std::get<1>(in));
  prepared.weight[0] = call.query_weight.contiguous();
  prepared.weight[1] = call.key_weight.contiguous();
  Arguments& arguments = prepared.arguments;
  const rotary::Job job{
      {&prepared.query, &prepared.key}, {&std::get<0>(out), &std::get<1>(out)}, 2};
  arguments.rotation = rotary::arguments(job, prepared.inputs, by, spec);
  for (int r = 0; r < 2; ++r) arguments.weight[r] = prepared.weight[r].const_data_ptr();
  arguments.weight_offset = call.options.weight_offset();
  arguments.eps = call.options.eps();
  return prepared;
}

/// The size of a token's heads in bytes.
int64_t token_bytes(const rotary::Arguments& rotation) {
  const int64_t heads = rotation.views[0].heads + rotation.views[1].heads;
  return heads * rotation.head_dim * core::size_of(rotation.scalar);
}

void launch(Arguments& arguments, const Tensor& query) {
  rotary::Arguments& rotation = arguments.rotation;
  rotation.error = dispatcher::device_error(query.device());
  dispatcher::launch(arguments, query, rotation.batch * rotation.seq, 4 * token_bytes(rotation),
                     norm_and_rotate_cpu, POSEMBED_CUDA_LAUNCHER(norm_and_rotate_cuda));
}

Two norm_rotary(const Call& call) {
  const rotary::SpecificationPointer spec = check(call);
  Two out = {rotary::empty_result(call.query), rotary::empty_result(call.key)};
  Prepared prepared = prepare(call, *spec, {call.query, call.key}, out, false);
  launch(prepared.arguments, call.query);
  return out;
}

Four norm_rotary_forward(const Call& call) {
  const rotary::SpecificationPointer spec = check(call);
  Two out = {rotary::empty_result(call.query), rotary::empty_result(call.key)};
  Two rstd = {empty_rstd(call.query, call.options.layout()),
              empty_rstd(call.key, call.options.layout())};
  Prepared prepared = prepare(call, *spec, {call.query, call.key}, out, false);
  prepared.arguments.rstd[0] = std::get<0>(rstd).mutable_data_ptr();
  prepared.arguments.rstd[1] = std::get<1>(rstd).mutable_data_ptr();
  launch(prepared.arguments, call.query);
  return std::tuple_cat(out, rstd);
}

void norm_rotary_in_place(const Call& call) {
  const rotary::SpecificationPointer spec = check(call);
  dispatcher::check_writable(call.query, "query");
  dispatcher::check_writable(call.key, "key");
  dispatcher::check_no_overlap(call.key, "key", call.query, "query");
  const Two both = {call.query, call.key};
  Prepared prepared = prepare(call, *spec, both, both, false);
  launch(prepared.arguments, call.query);
}

// ----------------------------------------------------------------------------------- backward

/// Checks the rstd saved by forward: [batch, seq, heads] in the compute type.
void check_rstd(const Tensor& rstd, const char* argument, const Tensor& of, const Call& call) {
  TORCH_CHECK_TYPE(rstd.scalar_type() == dispatcher::compute_type(of), argument, ": expected ",
                   dispatcher::compute_type(of), ", got ", rstd.scalar_type());
  dispatcher::check_same_device(rstd, argument, of, "query");
  const c10::SymDimVector sizes = rstd_sizes(of, rotary::dimensions(call.options.layout()));
  TORCH_CHECK_VALUE(rstd.sym_sizes() == c10::SymIntArrayRef(sizes), argument,
                    ": expected [batch, seq, heads], got ", rstd.sym_sizes());
}

void launch(BackwardArguments& arguments, const Tensor& query) {
  rotary::Arguments& rotation = arguments.forward.rotation;
  rotation.error = dispatcher::device_error(query.device());
  const int64_t tokens = rotation.batch * rotation.seq;
  const int64_t part_bytes = 6 * tokens * token_bytes(rotation) / arguments.parts;
  dispatcher::launch(arguments, query, arguments.parts, part_bytes, backward_cpu,
                     POSEMBED_CUDA_LAUNCHER(backward_cuda));
  if (dispatcher::on_cuda(query)) return;
  dispatcher::parallel_for(
      2 * rotation.head_dim, arguments.parts * int64_t{sizeof(float)},
      [&arguments](int64_t begin, int64_t end) { add_parts_cpu(arguments, begin, end); });
}

Four empty_gradients(const Call& call) {
  return {rotary::empty_result(call.query), rotary::empty_result(call.key),
          at::empty_symint(call.query_weight.sym_sizes(), call.query_weight.options()),
          at::empty_symint(call.key_weight.sym_sizes(), call.key_weight.options())};
}

Four norm_rotary_backward(const Tensor& query_gradient, const Tensor& key_gradient,
                          const Tensor& query_rstd, const Tensor& key_rstd, const Call& call) {
  const rotary::SpecificationPointer spec = check(call);
  dispatcher::check_like(query_gradient, "query_gradient", call.query, "query");
  dispatcher::check_like(key_gradient, "key_gradient", call.key, "key");
  check_rstd(query_rstd, "query_rstd", call.query, call);
  check_rstd(key_rstd, "key_rstd", call.key, call);
  Four result = empty_gradients(call);
  auto& [query_result, key_result, query_weight, key_weight] = result;
  const Prepared prepared =
      prepare(call, *spec, {query_gradient, key_gradient}, {query_result, key_result}, true);
  const Dimensions where = rotary::dimensions(call.options.layout());
  const Tensor normed[] = {dispatcher::with_contiguous_last_dim(call.query),
                           dispatcher::with_contiguous_last_dim(call.key)};
  const Tensor rstd[] = {query_rstd.contiguous(), key_rstd.contiguous()};
  BackwardArguments arguments;
  arguments.forward = prepared.arguments;
  for (int r = 0; r < 2; ++r) {
    arguments.normed[r] = rotary::head_view(normed[r], nullptr, where);
    arguments.forward.rstd[r] = const_cast<void*>(rstd[r].const_data_ptr());  // only read
  }
  const rotary::Arguments& rotation = arguments.forward.rotation;
  const int64_t most = dispatcher::on_cuda(call.query) ? parts_cuda : parts_cpu;
  arguments.parts = std::clamp<int64_t>(rotation.batch * rotation.seq, 1, most);
  const Tensor partial =
      at::empty({arguments.parts, 2, rotation.head_dim},
                call.query.options().dtype(dispatcher::compute_type(call.query)));
  arguments.partial = partial.mutable_data_ptr();
  arguments.weight_gradient[0] = query_weight.mutable_data_ptr();
  arguments.weight_gradient[1] = key_weight.mutable_data_ptr();
  launch(arguments, call.query);
  return result;
}

// --------------------------------------------------------------------------------------- Meta

Two norm_rotary_meta(const Call& call) {
  check(call);
  return {rotary::empty_result(call.query), rotary::empty_result(call.key)};
}

void norm_rotary_in_place_meta(const Call& call) { check(call); }

Four norm_rotary_forward_meta(const Call& call) {
  return std::tuple_cat(norm_rotary_meta(call), Two{empty_rstd(call.query, call.options.layout()),
                                                    empty_rstd(call.key, call.options.layout())});
}

Four norm_rotary_backward_meta(const Tensor& query_gradient, const Tensor& key_gradient,
                               const Tensor&, const Tensor&, const Call& call) {
  check(call);
  dispatcher::check_like(query_gradient, "query_gradient", call.query, "query");
  dispatcher::check_like(key_gradient, "key_gradient", call.key, "key");
  return empty_gradients(call);
}

// ----------------------------------------------------------------------------------- autocast

Call with_weights_like_data(Call call) {
  call.query_weight = dispatcher::follow(call.query_weight, call.query);
  call.key_weight = dispatcher::follow(call.key_weight, call.key);
  return call;
}

Two norm_rotary_autocast(const Call& call) {
  const dispatcher::AutocastDisabled disabled(c10::autocast_dispatch_keyset);
  return call_norm_rotary(with_weights_like_data(call));
}

void norm_rotary_in_place_autocast(const Call& call) {
  const dispatcher::AutocastDisabled disabled(c10::autocast_dispatch_keyset);
  call_norm_rotary_in_place(with_weights_like_data(call));
}

void register_autocast(torch::Library& m) {
  m.impl("norm_rotary", NormRotaryOperator::kernel<norm_rotary_autocast>);
  m.impl("norm_rotary_", NormRotaryInPlaceOperator::kernel<norm_rotary_in_place_autocast>);
}

void register_kernels(torch::Library& m) {
  m.impl("norm_rotary", NormRotaryOperator::kernel<norm_rotary>);
  m.impl("norm_rotary_forward", NormRotaryForwardOperator::kernel<norm_rotary_forward>);
  m.impl("norm_rotary_backward", NormRotaryBackwardOperator::kernel<norm_rotary_backward>);
  m.impl("norm_rotary_", NormRotaryInPlaceOperator::kernel<norm_rotary_in_place>);
}

}  // namespace

TORCH_LIBRARY_IMPL(posembed, CPU, m) { register_kernels(m); }

#if defined(POSEMBED_WITH_CUDA)
TORCH_LIBRARY_IMPL(posembed, CUDA, m) { register_kernels(m); }
#endif

TORCH_LIBRARY_IMPL(posembed, AutocastCPU, m) { register_autocast(m); }

TORCH_LIBRARY_IMPL(posembed, AutocastCUDA, m) { register_autocast(m); }

TORCH_LIBRARY_IMPL(posembed, Meta, m) {
  m.impl("norm_rotary", NormRotaryOperator::kernel<norm_rotary_meta>);
  m.impl("norm_rotary_forward", NormRotaryForwardOperator::kernel<norm_rotary_forward_meta>);
  m.impl("norm_rotary_backward", NormRotaryBackwardOperator::kernel<norm_rotary_backward_meta>);
  m.impl("norm_rotary_", NormRotaryInPlaceOperator::kernel<norm_rotary_in_place_meta>);
}

}  // namespace posembed::rotary_norm
