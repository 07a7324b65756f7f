// The QK-norm operators: norms of query and key, then rotary, in one kernel, and the gradients of
// RMSNorm by head in another. Eager and Meta kernels share their checks.
#include "rotary_norm/operator.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <torch/library.h>

#include <algorithm>

#include "dispatcher/autocast.h"
#include "dispatcher/checks.h"
#include "dispatcher/cuda_scope.h"
#include "dispatcher/launch.h"
#include "dispatcher/memory_checks.h"
#include "rotary/arguments.h"
#include "rotary_norm/arguments.h"
#include "rotary_norm/kernel.h"
#include "rotary_tables/arguments.h"

namespace posembed::rotary_norm {
namespace {

using rotary::Dimensions;

// ------------------------------------------------------------------------------------- checks

void check_given_tables(const Call& call, const RotarySpec& spec) {
  const NormRotaryCall& options = call.options;
  if (!options.cos().has_value()) {
    TORCH_CHECK_VALUE(!options.sin().has_value(), "cos: expected a tensor beside sin");
    return;
  }
  const Tensor& cos = *options.cos();
  TORCH_CHECK_VALUE(!options.positions().has_value(),
                    "positions: expected none where cos is given");
  TORCH_CHECK_VALUE(options.offset().number() == 0, "offset: expected 0 where cos is given, got ",
                    options.offset().number());
  TORCH_CHECK_VALUE(cos.dim() == 2 || cos.dim() == 3,
                    "cos: expected [batch or 1, seq, width] or [seq, width], got ",
                    cos.sym_sizes());
  const c10::SymInt width = cos.sym_size(-1);
  TORCH_CHECK_VALUE(width == spec.rotary_dim / 2 || (width == spec.rotary_dim && !cos.is_complex()),
                    "cos: expected rotary_dim / 2 = ", spec.rotary_dim / 2,
                    " columns, or rotary_dim if it is real, got ", width);
  rotary_tables::check_tables(tables_of(call), call.query, rotary::dimensions(options.layout()));
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
  check_parameters(call);
  check_given_tables(call, spec->spec);
  return spec;
}

/// The same for operators that only have RMSNorm of each head and exact angles.
rotary::SpecificationPointer check_fused(const Call& call) {
  TORCH_CHECK_VALUE(!is_general(call), "centred, all_heads, cos: expected none for this operator");
  return check(call);
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
struct KernelCall {
  Arguments arguments;
  rotary::Inputs inputs;
  RotaryTables tables;
  Parameters parameters;
  Tensor query, key;
};

void set_tables(const Call& call, KernelCall* prepared) {
  const NormRotaryCall& options = call.options;
  Arguments& arguments = prepared->arguments;
  rotary::Arguments& rotation = arguments.rotation;
  prepared->tables = rotary_tables::readable(tables_of(call));
  rotary_tables::set_tables(prepared->tables, &rotation);
  rotation.reverse = false;
  if (options.numerics() == Numerics::float32_product) return;
  arguments.row_rounding =
      options.round_before_weight() ? RowRounding::before_weight : RowRounding::after_weight;
  const at::ScalarType type = call.query.scalar_type();
  const Tensor& cos = *options.cos();
  if (!cos.is_complex() && at::promote_types(type, cos.scalar_type()) == type) {
    rotation.product_rounding = rotary::ProductRounding::to_data_type;
  }
}

/// The arguments for reading rows of `in` and writing rows of `out`: query and key, or their
/// gradients.
KernelCall kernel_call(const Call& call, const rotary::Specification& spec, const Two& in,
                       const Two& out, bool transpose) {
  KernelCall prepared;
  const rotary::Rotation rotation = rotation_of(call, transpose);
  prepared.inputs = rotary::checked_inputs(
      rotation.call, call.query.size(rotary::dimensions(rotation.call.layout()).seq));
  prepared.query = dispatcher::with_contiguous_last_dim(std::get<0>(in));
  prepared.key = dispatcher::with_contiguous_last_dim(std::get<1>(in));
  Arguments& arguments = prepared.arguments;
  const rotary::Job job{
      {&prepared.query, &prepared.key}, {&std::get<0>(out), &std::get<1>(out)}, 2};
  arguments.rotation = rotary::arguments(job, prepared.inputs, rotation, spec);
  set_norm(call, &prepared.parameters, &arguments);
  if (call.options.cos().has_value()) set_tables(call, &prepared);
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

/// The specification of a rotation, and memory for its results.
template <typename Result>
struct Prepared {
  rotary::SpecificationPointer spec;
  Result result;
};

Two empty_pair(const Call& call) {
  return {rotary::empty_result(call.query), rotary::empty_result(call.key)};
}

Prepared<Two> prepare(const Call& call) { return {check(call), empty_pair(call)}; }

void compute(const Call& call, const Prepared<Two>& prepared) {
  KernelCall kernel =
      kernel_call(call, *prepared.spec, {call.query, call.key}, prepared.result, false);
  launch(kernel.arguments, call.query);
}

Prepared<Four> prepare_forward(const Call& call) {
  rotary::SpecificationPointer spec = check_fused(call);
  const Layout layout = call.options.layout();
  return {std::move(spec), std::tuple_cat(empty_pair(call), Two{empty_rstd(call.query, layout),
                                                                empty_rstd(call.key, layout)})};
}

void forward(const Call& call, const Prepared<Four>& prepared) {
  const auto& [query, key, query_rstd, key_rstd] = prepared.result;
  KernelCall kernel =
      kernel_call(call, *prepared.spec, {call.query, call.key}, {query, key}, false);
  kernel.arguments.rstd[0] = query_rstd.mutable_data_ptr();
  kernel.arguments.rstd[1] = key_rstd.mutable_data_ptr();
  launch(kernel.arguments, call.query);
}

rotary::SpecificationPointer check_in_place(const Call& call) {
  rotary::SpecificationPointer spec = check(call);
  dispatcher::check_writable(call.query, "query");
  dispatcher::check_writable(call.key, "key");
  return spec;
}

void compute_in_place(const Call& call, const rotary::SpecificationPointer& spec) {
  dispatcher::check_no_overlap(call.key, "key", call.query, "query");
  const Two both = {call.query, call.key};
  KernelCall kernel = kernel_call(call, *spec, both, both, false);
  launch(kernel.arguments, call.query);
}

// ----------------------------------------------------------------------------------- backward

/// Checks the rstd saved by forward: [batch, seq, heads] in the compute type.
void check_rstd(const Tensor& rstd, const char* argument, const Tensor& normed, const Call& call) {
  TORCH_CHECK_TYPE(rstd.scalar_type() == dispatcher::compute_type(normed), argument, ": expected ",
                   dispatcher::dtype_name(dispatcher::compute_type(normed)), ", got ",
                   dispatcher::dtype_name(rstd.scalar_type()));
  const c10::SymDimVector sizes = rstd_sizes(normed, rotary::dimensions(call.options.layout()));
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
  const auto of_weight = [&](const MaybeTensor& weight) {
    if (!weight.has_value()) return at::empty({0}, call.query.options());
    return at::empty_symint(weight->sym_sizes(), weight->options());
  };
  return {rotary::empty_result(call.query), rotary::empty_result(call.key),
          of_weight(call.query_weight), of_weight(call.key_weight)};
}

Prepared<Four> prepare_backward(const Tensor& query_gradient, const Tensor& key_gradient,
                                const Tensor& query_rstd, const Tensor& key_rstd,
                                const Call& call) {
  rotary::SpecificationPointer spec = check_fused(call);
  dispatcher::check_like(query_gradient, "query_gradient", call.query, "query");
  dispatcher::check_like(key_gradient, "key_gradient", call.key, "key");
  check_rstd(query_rstd, "query_rstd", call.query, call);
  check_rstd(key_rstd, "key_rstd", call.key, call);
  return {std::move(spec), empty_gradients(call)};
}

/// The call with ones for missing weights, which the CUDA kernel of the backward pass needs.
Call with_weights(Call call) {
  if (!dispatcher::on_cuda(call.query)) return call;
  const Tensor* const like = any_parameter(call);
  const auto ones = [&] {
    return at::ones({call.query.size(-1)},
                    like == nullptr ? call.query.options() : like->options());
  };
  // Only their data is read: the offset belongs to weights that are given.
  const double offset = call.options.weight_offset();
  if (!call.query_weight) call.query_weight = ones() - offset;
  if (!call.key_weight) call.key_weight = ones() - offset;
  return call;
}

void backward(const Tensor& query_gradient, const Tensor& key_gradient, const Tensor& query_rstd,
              const Tensor& key_rstd, const Call& call, const Prepared<Four>& prepared) {
  const auto& [query_result, key_result, query_weight, key_weight] = prepared.result;
  const KernelCall kernel =
      kernel_call(with_weights(call), *prepared.spec, {query_gradient, key_gradient},
                  {query_result, key_result}, true);
  const Dimensions where = rotary::dimensions(call.options.layout());
  const Tensor normed[] = {dispatcher::with_contiguous_last_dim(call.query),
                           dispatcher::with_contiguous_last_dim(call.key)};
  const Tensor rstd[] = {query_rstd.contiguous(), key_rstd.contiguous()};
  BackwardArguments arguments;
  arguments.forward = kernel.arguments;
  for (int r = 0; r < 2; ++r) {
    arguments.normed[r] = rotary::head_view(normed[r], nullptr, where);
    arguments.forward.rstd[r] = const_cast<void*>(rstd[r].const_data_ptr());  // only read
  }
  const rotary::Arguments& rotation = arguments.forward.rotation;
  const int64_t max_parts = dispatcher::on_cuda(call.query) ? parts_cuda : parts_cpu;
  arguments.parts = std::clamp<int64_t>(rotation.batch * rotation.seq, 1, max_parts);
  const Tensor partial =
      at::empty({arguments.parts, 2, rotation.head_dim},
                call.query.options().dtype(dispatcher::compute_type(call.query)));
  arguments.partial = partial.mutable_data_ptr();
  if (call.query_weight) arguments.weight_gradient[0] = query_weight.mutable_data_ptr();
  if (call.key_weight) arguments.weight_gradient[1] = key_weight.mutable_data_ptr();
  launch(arguments, call.query);
}

// ----------------------------------------------------------------------------------- autocast

Call with_weights_like_data(Call call) {
  call.query_weight = dispatcher::follow(call.query_weight, call.query);
  call.key_weight = dispatcher::follow(call.key_weight, call.key);
  call.options.query_bias(dispatcher::follow(call.options.query_bias(), call.query));
  call.options.key_bias(dispatcher::follow(call.options.key_bias(), call.key));
  return call;
}

Two autocast(const Call& call) { return norm_rotary(with_weights_like_data(call)); }

void autocast_in_place(const Call& call) { norm_rotary_(with_weights_like_data(call)); }

}  // namespace

RotaryTables tables_of(const Call& call) {
  const rotary::SpecificationPointer found = rotary::specification(call.spec);
  const RotarySpec& spec = found->spec;
  RotaryTables tables;
  tables.cos(*call.options.cos()).sin(call.options.sin()).layout(call.options.layout());
  tables.interleaved(spec.interleaved).start(spec.rotary_start);
  tables.half_width(call.options.cos()->sym_size(-1) == spec.rotary_dim / 2);
  return tables.numerics(call.options.numerics());
}

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  norm_rotary.implement<prepare, compute>(m);
  norm_rotary.autocast<autocast>(m);
  norm_rotary_.implement<check_in_place, compute_in_place>(m);
  norm_rotary_.autocast<autocast_in_place>(m);
  norm_rotary_forward.implement<prepare_forward, forward>(m);
  norm_rotary_backward.implement<prepare_backward, backward>(m);
}

}  // namespace posembed::rotary_norm
