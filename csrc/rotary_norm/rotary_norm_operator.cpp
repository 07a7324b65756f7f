// The QK-norm operators: norms of query and key, then rotary, in one kernel, and the gradients of
// RMSNorm by head in another. Eager and Meta kernels share their checks.
#include "rotary_norm/rotary_norm_operator.h"

#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <tuple>
#include <utility>
#include <vector>

#include "dispatcher/autograd.h"
#include "dispatcher/checks.h"
#include "dispatcher/launch.h"
#include "dispatcher/output_memory.h"
#include "dispatcher/tensors.h"
#include "rotary_tables/rotary_tables_operator.h"

namespace posembed::rotary_norm {
namespace {

// --------------------------------------------------------------------------------------- arguments

/// A parameter of the norm, its name and the tensor that it belongs to.
struct Parameter {
  const MaybeTensor& tensor;
  const char* argument;
  const Tensor& rows;
};

std::array<Parameter, 4> parameters_of(const Call& call) {
  const NormRotaryCall& options = call.options;
  return {{{call.query_weight, "query_weight", call.query},
           {call.key_weight, "key_weight", call.key},
           {options.query_bias(), "query_bias", call.query},
           {options.key_bias(), "key_bias", call.key}}};
}

/// The first parameter that is given; nullptr: none is.
const Tensor* any_parameter(const Call& call) {
  for (const Parameter& parameter : parameters_of(call)) {
    if (parameter.tensor.has_value()) return &*parameter.tensor;
  }
  return nullptr;
}

void check_parameter(const Parameter& parameter, const Call& call) {
  if (!parameter.tensor.has_value()) return;
  // weight, bias: [head_dim], or [heads * head_dim] of a norm over all heads
  const Tensor& tensor = *parameter.tensor;
  const char* const argument = parameter.argument;
  const bool all_heads = call.options.all_heads();
  dispatcher::check_rank(tensor, argument, 1, all_heads ? "[heads * head_dim]" : "[head_dim]");
  if (tensor.scalar_type() != at::kFloat || call.query.scalar_type() == at::kDouble) {
    dispatcher::check_same_dtype(tensor, argument, call.query, "query");
  }
  const Tensor& first = *any_parameter(call);
  TORCH_CHECK_TYPE(tensor.scalar_type() == first.scalar_type(), argument, ": expected ",
                   dispatcher::dtype_name(first.scalar_type()),
                   ", as of the other parameters, got ",
                   dispatcher::dtype_name(tensor.scalar_type()));
  const int64_t heads = rotary::dimensions(call.options.layout()).heads;
  const c10::SymInt size =
      call.query.sym_size(-1) * (all_heads ? parameter.rows.sym_size(heads) : c10::SymInt(1));
  dispatcher::check_size(tensor.sym_size(0), size, argument,
                         all_heads ? "heads * head_dim" : "head_dim");
}

}  // namespace

void check_parameters(const Call& call) {
  const NormRotaryCall& options = call.options;
  for (const Parameter& parameter : parameters_of(call)) check_parameter(parameter, call);
  for (const auto& [bias, argument] : {std::pair(&options.query_bias(), "query_bias"),
                                       std::pair(&options.key_bias(), "key_bias")}) {
    TORCH_CHECK_VALUE(!bias->has_value() || options.centred(), argument,
                      ": expected none without LayerNorm");
  }
  dispatcher::check_eps(options.eps());
  TORCH_CHECK_VALUE(std::isfinite(options.weight_offset()),
                    "weight_offset: expected a finite number, got ", options.weight_offset());
  const bool weighted = call.query_weight.has_value() || call.key_weight.has_value();
  TORCH_CHECK_VALUE(options.weight_offset() == 0 || weighted,
                    "weight_offset: expected 0 without weights, got ", options.weight_offset());
}

void set_norm(const Call& call, Parameters* parameters, Arguments* result) {
  Arguments& arguments = *result;
  const std::array<Parameter, 4> all = parameters_of(call);
  arguments.parameter_scalar = arguments.rotation.scalar;
  for (size_t i = 0; i < 4; ++i) {
    if (!all[i].tensor.has_value()) continue;
    const Tensor& parameter = parameters->tensor[i] = all[i].tensor->contiguous();
    (i < 2 ? arguments.weight : arguments.bias)[i % 2] = parameter.const_data_ptr();
    arguments.parameter_scalar = dispatcher::scalar_of(parameter);
  }
  arguments.centred = call.options.centred();
  arguments.all_heads = call.options.all_heads();
  arguments.weight_offset = call.options.weight_offset();
  arguments.eps = call.options.eps();
}

namespace {

// ---------------------------------------------------------------------------------------- operator

using rotary::Dimensions;

// ------------------------------------------------------------------------------------- checks

/// The tables of a call that has them.
RotaryTables tables_of(const Call& call) {
  const rotary::SpecificationPointer found = rotary::specification(call.spec);
  const RotarySpec& spec = found->spec;
  RotaryTables tables;
  tables.cos(*call.options.cos()).sin(call.options.sin()).layout(call.options.layout());
  tables.interleaved(spec.interleaved).start(spec.rotary_start);
  tables.half_width(call.options.cos()->sym_size(-1) == spec.rotary_dim / 2);
  return tables.numerics(call.options.numerics());
}

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
  prepared.inputs = rotary::checked_inputs(rotation.call, call.query);
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
  const auto run = [](const Arguments& call, int64_t begin, int64_t end) {
    const dispatcher::ProfiledRange range(
        [&] { return is_general(call) ? "norm_rotary: general" : "norm_rotary: fused"; });
    norm_and_rotate_cpu(call, begin, end);
  };
  dispatcher::launch(arguments, query, rotation.batch * rotation.seq, 4 * token_bytes(rotation),
                     run, POSEMBED_CUDA_LAUNCHER(norm_and_rotate_cuda));
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

/// The gradients of query and key, and the rstd of both.
struct Saved {
  const Tensor &query_gradient, &key_gradient, &query_rstd, &key_rstd;
};

/// The checks of norm_rotary_backward.
rotary::SpecificationPointer check_backward(const Saved& saved, const Call& call) {
  rotary::SpecificationPointer spec = check_fused(call);
  dispatcher::check_like(saved.query_gradient, "query_gradient", call.query, "query");
  dispatcher::check_like(saved.key_gradient, "key_gradient", call.key, "key");
  check_rstd(saved.query_rstd, "query_rstd", call.query, call);
  check_rstd(saved.key_rstd, "key_rstd", call.key, call);
  return spec;
}

/// Memory for the gradient of a weight, empty if there is none.
Tensor empty_gradient(const MaybeTensor& weight, const Call& call) {
  if (!weight.has_value()) return at::empty({0}, call.query.options());
  return at::empty_symint(weight->sym_sizes(), weight->options());
}

Four prepare_backward(const Tensor& query_gradient, const Tensor& key_gradient,
                      const Tensor& query_rstd, const Tensor& key_rstd, const Call& call) {
  check_backward({query_gradient, key_gradient, query_rstd, key_rstd}, call);
  return {rotary::empty_result(call.query), rotary::empty_result(call.key),
          empty_gradient(call.query_weight, call), empty_gradient(call.key_weight, call)};
}

/// Writes the gradients of query, key and weights.
void write_gradients(const Saved& saved, const Call& call, const Four& results) {
  const auto& [query_result, key_result, query_weight, key_weight] = results;
  const KernelCall kernel =
      kernel_call(call, *rotary::specification(call.spec),
                  {saved.query_gradient, saved.key_gradient}, {query_result, key_result}, true);
  const Dimensions where = rotary::dimensions(call.options.layout());
  const Tensor normed[] = {dispatcher::with_contiguous_last_dim(call.query),
                           dispatcher::with_contiguous_last_dim(call.key)};
  const Tensor rstd[] = {saved.query_rstd.contiguous(), saved.key_rstd.contiguous()};
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

/// Weights and biases as autocast gives them.
Call with_weights_like_data(Call call) {
  call.query_weight = dispatcher::follow(call.query_weight, call.query);
  call.key_weight = dispatcher::follow(call.key_weight, call.key);
  call.options.query_bias(dispatcher::follow(call.options.query_bias(), call.query));
  call.options.key_bias(dispatcher::follow(call.options.key_bias(), call.key));
  return call;
}

void backward(const Tensor& query_gradient, const Tensor& key_gradient, const Tensor& query_rstd,
              const Tensor& key_rstd, const Call& call, const Four& results) {
  write_gradients({query_gradient, key_gradient, query_rstd, key_rstd}, call, results);
}

Two autocast(const Call& call) { return norm_rotary(with_weights_like_data(call)); }

void autocast_in_place(const Call& call) { norm_rotary_(with_weights_like_data(call)); }

// ---------------------------------------------------------------------------------------- gradient
// Derivatives of the QK-norm operators. The usual backward pass, of RMSNorm by head, is one kernel.
// Those of other norms and of tables, second derivatives and tangents use the same formulas as a
// chain of differentiable operators.

// -------------------------------------------------------------------- as a chain of operators

/// One of the two tensors of a call.
struct Part {
  const Tensor& rows;
  const MaybeTensor &weight, &bias;
};

Part query_of(const Call& call) {
  return {call.query, call.query_weight, call.options.query_bias()};
}

Part key_of(const Call& call) { return {call.key, call.key_weight, call.options.key_bias()}; }

/// Exchanges the heads and what stands between them and head_dim, if anything: the same again
/// undoes it.
Tensor heads_last(const Call& call, const Tensor& tensor) {
  const bool apart = rotary::dimensions(call.options.layout()).heads < tensor.dim() - 2;
  return apart ? tensor.transpose(-3, -2) : tensor;
}

/// Brings what a norm sums over into the last dimension: a head, or all heads of a token.
Tensor norm_rows(const Call& call, const Tensor& tensor) {
  if (!call.options.all_heads()) return tensor;
  const Tensor heads = heads_last(call, tensor);  // [.., heads, head_dim]
  c10::SymDimVector sizes(heads.sym_sizes().begin(), heads.sym_sizes().end() - 1);
  sizes.back() *= heads.sym_size(-1);
  return heads.reshape_symint(sizes);
}

/// The inverse of norm_rows(), for rows of the shape of `like`.
Tensor head_rows(const Call& call, const Tensor& rows, const Tensor& like) {
  if (!call.options.all_heads()) return rows;
  const Tensor heads = heads_last(call, like);
  return heads_last(call, rows.reshape_symint(heads.sym_sizes()));
}

dispatcher::Normed normed(const Call& call, const Tensor& tensor) {
  const Tensor rows = norm_rows(call, tensor.to(dispatcher::compute_type(tensor)));
  return dispatcher::norm_chain(rows, call.options.centred(), call.options.eps());
}

/// What multiplies the normalised rows of a tensor that has a weight.
Tensor factor(const Call& call, const Tensor& weight, at::ScalarType type) {
  return at::add(weight.to(type), call.options.weight_offset());
}

Tensor rotate(const Call& call, const Tensor& tensor, bool transpose) {
  if (call.options.cos().has_value()) {
    return rotary_tables::rotary_tables(tensor, {tables_of(call), transpose});
  }
  return rotary::rotary(tensor, rotation_of(call, transpose));
}

/// Whether a call has the roundings of a PyTorch program.
bool is_in_steps(const Call& call) {
  return call.options.cos().has_value() && call.options.numerics() == Numerics::float32;
}

Tensor forward_chain(const Call& call, const Part& part) {
  const at::ScalarType wide = dispatcher::compute_type(part.rows);
  const at::ScalarType narrow = part.rows.scalar_type();
  const bool steps = is_in_steps(call), rounds_first = steps && call.options.round_before_weight();
  Tensor rows = normed(call, part.rows).rows;
  if (rounds_first) rows = rows.to(narrow).to(wide);
  if (part.weight.has_value()) rows = at::mul(rows, factor(call, *part.weight, wide));
  if (part.bias.has_value()) rows = at::add(rows, part.bias->to(wide));
  if (steps) rows = rows.to(narrow);
  return rotate(call, head_rows(call, rows, part.rows), false).to(narrow);
}

Two forward_chain(const Call& call) {
  rotary::check_exact_angles(*rotary::specification(call.spec), "norm_rotary");
  return {forward_chain(call, query_of(call)), forward_chain(call, key_of(call))};
}

/// The gradients of a tensor, its weight and its bias; undefined where there is none.
struct Gradients {
  Tensor rows, weight, bias;
};

Gradients backward_chain(const Call& call, const Part& part, const Tensor& output_gradient) {
  const at::ScalarType wide = dispatcher::compute_type(part.rows);
  const dispatcher::Normed x = normed(call, part.rows);
  Call exact = call;
  exact.options.numerics(Numerics::float32_product);
  Tensor rotated = norm_rows(call, rotate(exact, output_gradient.to(wide), true));
  std::vector<int64_t> all_but_last(static_cast<size_t>(rotated.dim() - 1));
  for (size_t i = 0; i < all_but_last.size(); ++i) all_but_last[i] = static_cast<int64_t>(i);
  Gradients result;
  if (part.bias.has_value()) {
    result.bias = rotated.sum(all_but_last).to(part.bias->scalar_type());
  }
  if (part.weight.has_value()) {
    result.weight = at::mul(rotated, x.rows).sum(all_but_last).to(part.weight->scalar_type());
    rotated = at::mul(rotated, factor(call, *part.weight, wide));
  }
  const Tensor rows = dispatcher::norm_backward_chain(x, call.options.centred(), rotated);
  result.rows = head_rows(call, rows, part.rows).to(part.rows.scalar_type());
  return result;
}

/// For a call that is not general.
Four backward_chain(const Call& call, const Tensor& query_gradient, const Tensor& key_gradient) {
  const auto or_empty = [](const Tensor& gradient, const Tensor& like) {
    return gradient.defined() ? gradient : at::empty({0}, like.options());
  };
  const Gradients query = backward_chain(call, query_of(call), query_gradient);
  const Gradients key = backward_chain(call, key_of(call), key_gradient);
  return {query.rows, key.rows, or_empty(query.weight, query.rows), or_empty(key.weight, key.rows)};
}

bool is_tangent(const Tensor& tensor) { return dispatcher::tangent(tensor).defined(); }

bool is_tangent(const MaybeTensor& tensor) { return tensor.has_value() && is_tangent(*tensor); }

template <typename... Tensors>
bool have_tangent(const Tensors&... tensors) {
  return (is_tangent(tensors) || ...);
}

bool has_tangent(const Call& call) {
  const NormRotaryCall& options = call.options;
  return have_tangent(call.query, call.key, call.query_weight, call.key_weight,
                      options.query_bias(), options.key_bias(), options.cos(), options.sin());
}

/// Whether tables need a gradient, which only the chain has.
bool tables_require_grad(const Call& call) {
  return torch::autograd::compute_requires_grad(call.options.cos(), call.options.sin());
}

// ------------------------------------------------------------------------ by the fused kernels

/// `query_rstd`, `key_rstd`: saved unless the call is general.
dispatcher::variable_list fused_gradient(const dispatcher::Gradients& gradients,
                                         const Call& forward, const Tensor& query_rstd,
                                         const Tensor& key_rstd) {
  const auto or_zeros = [](const Tensor& gradient, const Tensor& like) {
    return gradient.defined() ? gradient : at::zeros_like(like);
  };
  const Tensor query_gradient = or_zeros(gradients[0], forward.query);
  const Tensor key_gradient = or_zeros(gradients[1], forward.key);
  if (is_general(forward)) {
    const Gradients query = backward_chain(forward, query_of(forward), query_gradient);
    const Gradients key = backward_chain(forward, key_of(forward), key_gradient);
    return {query.rows, key.rows, query.weight, key.weight, query.bias, key.bias};
  }
  auto [query, key, query_weight, key_weight] =
      norm_rotary_backward(query_gradient, key_gradient, query_rstd, key_rstd, forward);
  if (!forward.query_weight.has_value()) query_weight = Tensor();
  if (!forward.key_weight.has_value()) key_weight = Tensor();
  return {query, key, query_weight, key_weight, Tensor(), Tensor()};
}

bool requires_grad(const Call& call) {
  const NormRotaryCall& options = call.options;
  return torch::autograd::compute_requires_grad(call.query, call.key, call.query_weight,
                                                call.key_weight, options.query_bias(),
                                                options.key_bias());
}

auto backward_node(const Call& call) {
  const NormRotaryCall& options = call.options;
  using Node = dispatcher::FunctionNode<norm_rotary, fused_gradient>;
  return dispatcher::node_for<Node>(call.query, call.key, call.query_weight, call.key_weight,
                                    options.query_bias(), options.key_bias());
}

/// A separate operator also for autograd: an outer torch.func transform differentiates this call.
/// The norms' divisors need no derivatives, because the chain does not use them.
Four forward_autograd(const Call& call) {
  auto node = backward_node(call);
  Four outputs = dispatcher::below_autograd([&] { return norm_rotary_forward(call); });
  auto& [query, key, query_rstd, key_rstd] = outputs;
  if (has_tangent(call)) {
    std::tie(query, key) = forward_chain(call);
  } else if (node) {
    node->save(call, query_rstd, key_rstd);
    torch::autograd::set_history(query, node);
    torch::autograd::set_history(key, node);
  }
  return outputs;
}

/// A general call, whose backward pass needs only its arguments.
Two general_autograd(const Call& call) {
  if (has_tangent(call) || tables_require_grad(call)) return forward_chain(call);
  auto node = backward_node(call);
  Two outputs = dispatcher::below_autograd([&] { return norm_rotary(call); });
  if (node) {
    node->save(call, Tensor(), Tensor());
    torch::autograd::set_history(std::get<0>(outputs), node);
    torch::autograd::set_history(std::get<1>(outputs), node);
  }
  return outputs;
}

Two pair_autograd(const Call& call) {
  if (is_general(call)) return general_autograd(call);
  if (requires_grad(call) || has_tangent(call)) {
    auto [query, key, query_rstd, key_rstd] = forward_autograd(call);
    return {query, key};
  }
  return dispatcher::below_autograd([&] { return norm_rotary(call); });
}

Four backward_autograd(const Tensor& query_gradient, const Tensor& key_gradient,
                       const Tensor& query_rstd, const Tensor& key_rstd, const Call& call) {
  const bool again =
      requires_grad(call) || torch::autograd::compute_requires_grad(query_gradient, key_gradient);
  if (again || has_tangent(call) || have_tangent(query_gradient, key_gradient)) {
    return backward_chain(call, query_gradient, key_gradient);
  }
  return dispatcher::below_autograd([&] {
    return norm_rotary_backward(query_gradient, key_gradient, query_rstd, key_rstd, call);
  });
}

// ------------------------------------------------------------------------------ packed projections
// Query and key of a packed projection: normalised and rotated out of its memory and, in the
// backward pass, into its one gradient, as rotary_packed does.

/// Whether each group of a token is a token of its own: where a group has several query heads, no
/// stride leads from head to head. General calls take a copy of the queries instead.
bool groups_are_tokens(const PackedCall& call) {
  return call.groups() > 1 && call.heads > call.key_heads && !is_general(call.call);
}

/// A part of the projection, [.., groups, heads of a group, head_dim], as norm_rotary takes it.
Tensor rows_of(const Tensor& part, const PackedCall& call) {
  return groups_are_tokens(call) ? part.flatten(-4, -3) : part.flatten(-3, -2);
}

/// The inverse of rows_of().
Tensor part_of(const Tensor& rows, const PackedCall& call) {
  return groups_are_tokens(call) ? rows.unflatten(-3, {-1, call.groups()})
                                 : rows.unflatten(-2, {call.groups(), -1});
}

/// From a part of the projection to heads in the call's layout, and back.
Tensor heads_of(const Tensor& part, const PackedCall& call) {
  return rotary::exchanged(part.flatten(-3, -2), call.call.options.layout());
}

Tensor by_group(const Tensor& heads, const PackedCall& call) {
  return rotary::by_group(heads, call, call.call.options.layout());
}

/// The positions of tokens that are groups.
void repeat_positions(NormRotaryCall& options, const PackedCall& call) {
  MaybeTensor positions = options.positions();
  const bool batch_last = options.layout() == Layout::sbhd;  // groups are then samples
  if (!positions.has_value() && !batch_last) {
    const int64_t seq = rotary::dimensions(options.layout()).seq;
    const c10::SymInt first = options.offset().number();
    positions =
        at::arange(first, first + call.qkv.sym_size(seq), call.qkv.options().dtype(at::kLong));
    options.offset(0);
  }
  if (!positions.has_value()) return;
  const bool shared = batch_last && (positions->dim() < 2 || positions->sym_size(-2) == 1);
  if (!shared) positions = positions->repeat_interleave(call.groups(), batch_last ? -2 : -1);
  options.positions(positions);
}

/// The call of norm_rotary for views of the projection.
Call of_views(const PackedCall& call) {
  const auto [query, key, value] = rotary::parts_of(call.qkv, call);
  Call views = call.call;
  views.query = rows_of(query, call);
  views.key = rows_of(key, call);
  if (views.options.layout() == Layout::bhsd) views.options.layout(Layout::bshd);
  if (groups_are_tokens(call)) repeat_positions(views.options, call);
  return views;
}

void check_packed(const PackedCall& call) {
  rotary::check_packed(call.qkv, {call, rotation_of(call.call)});
}

// --------------------------------------------------------------------------------- the kernels

void packed_in_place(const PackedCall& call) {
  dispatcher::check_holds_numbers(call.qkv, "qkv");
  check_packed(call);
  dispatcher::check_writable(call.qkv, "qkv");
  const Call views = of_views(call);
  norm_rotary_(views);
  const auto [query, key, value] = rotary::parts_of(call.qkv, call);
  if (!views.query.is_alias_of(call.qkv)) query.copy_(part_of(views.query, call));
  if (!views.key.is_alias_of(call.qkv)) key.copy_(part_of(views.key, call));
}

Two rows_of(const Tensor& query, const Tensor& key, const PackedCall& call) {
  return {rows_of(by_group(query, call), call), rows_of(by_group(key, call), call)};
}

Three prepare_packed_backward(const Tensor& query, const Tensor& key, const Tensor& value,
                              const Tensor& query_rstd, const Tensor& key_rstd,
                              const PackedCall& call) {
  check_packed(call);
  const Call views = of_views(call);
  const auto [query_rows, key_rows] = rows_of(query, key, call);
  check_backward({query_rows, key_rows, query_rstd, key_rstd}, views);
  dispatcher::check_like(value, "value_gradient", key, "key_gradient");
  return {dispatcher::empty_symint(call.qkv.sym_sizes(), call.qkv.options()),
          empty_gradient(views.query_weight, views), empty_gradient(views.key_weight, views)};
}

void packed_backward(const Tensor& query, const Tensor& key, const Tensor& value,
                     const Tensor& query_rstd, const Tensor& key_rstd, const PackedCall& call,
                     const Three& results) {
  const auto& [packed, query_weight, key_weight] = results;
  const auto [query_out, key_out, value_out] = rotary::parts_of(packed, call);
  const auto [query_rows, key_rows] = rows_of(query, key, call);
  write_gradients({query_rows, key_rows, query_rstd, key_rstd}, of_views(call),
                  {rows_of(query_out, call), rows_of(key_out, call), query_weight, key_weight});
  value_out.copy_(by_group(value, call));
}

// -------------------------------------------------------------------------------- derivatives

dispatcher::variable_list packed_gradient(const dispatcher::Gradients& gradients,
                                          const PackedCall& forward, const Tensor& query_rstd,
                                          const Tensor& key_rstd) {
  const auto or_zeros = [&](size_t i, const Tensor& part) {
    return gradients[i].defined() ? gradients[i] : at::zeros_like(heads_of(part, forward));
  };
  const auto [query, key, value] = rotary::parts_of(forward.qkv, forward);
  auto [packed, query_weight, key_weight] = norm_rotary_packed_backward(
      or_zeros(0, query), or_zeros(1, key), or_zeros(2, value), query_rstd, key_rstd, forward);
  if (!forward.call.query_weight.has_value()) query_weight = Tensor();
  if (!forward.call.key_weight.has_value()) key_weight = Tensor();
  return {packed, query_weight, key_weight};
}

/// General calls and tangents take the way of separate tensors.
Three packed(const PackedCall& call) {
  check_packed(call);
  const auto value = [&] { return heads_of(std::get<2>(rotary::parts_of(call.qkv, call)), call); };
  const Call views = of_views(call);
  using Node = dispatcher::FunctionNode<norm_rotary_packed, packed_gradient>;
  auto node = dispatcher::node_for<Node>(call.qkv, call.call.query_weight, call.call.key_weight);
  if (!node || is_general(views) || has_tangent(views)) {
    const auto [query, key] = norm_rotary(views);
    return {heads_of(part_of(query, call), call), heads_of(part_of(key, call), call), value()};
  }
  const auto [query, key, query_rstd, key_rstd] = dispatcher::below_autograd([&] {
    const auto [query, key, query_rstd, key_rstd] = norm_rotary_forward(views);
    return Four{heads_of(part_of(query, call), call), heads_of(part_of(key, call), call),
                query_rstd, key_rstd};
  });
  node->save(call, query_rstd, key_rstd);
  torch::autograd::set_history(query, node);
  torch::autograd::set_history(key, node);
  const at::AutoDispatchBelowAutograd only_tracked_as_view;
  const Tensor third = value();
  torch::autograd::set_history(third, node);
  return {query, key, third};
}

/// Second derivatives and tangents take the way of separate tensors, too.
Three packed_backward_autograd(const Tensor& query, const Tensor& key, const Tensor& value,
                               const Tensor& query_rstd, const Tensor& key_rstd,
                               const PackedCall& call) {
  const Call views = of_views(call);
  if (!torch::autograd::compute_requires_grad(query, key, value, call.qkv, views.query_weight,
                                              views.key_weight) &&
      !has_tangent(views) && !have_tangent(query, key, value)) {
    return dispatcher::below_autograd(
        [&] { return norm_rotary_packed_backward(query, key, value, query_rstd, key_rstd, call); });
  }
  const auto [query_rows, key_rows] = rows_of(query, key, call);
  const auto [of_query, of_key, query_weight, key_weight] =
      norm_rotary_backward(query_rows, key_rows, query_rstd, key_rstd, views);
  const Tensor packed =
      at::cat({part_of(of_query, call), part_of(of_key, call), by_group(value, call)}, -2);
  return {packed.flatten(-3), query_weight, key_weight};
}

Three packed_autocast(const PackedCall& call) {
  PackedCall changed = call;
  changed.call.query = changed.call.key = call.qkv;
  changed.call = with_weights_like_data(changed.call);
  return norm_rotary_packed(changed);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  const std::string arguments =
      "Tensor? query_weight, "
      "Tensor? key_weight, "
      "str spec, "
      "Tensor? positions=None, "
      "str layout=\"bshd\", "
      "SymInt offset=0, "
      "float eps=1e-6, "
      "float weight_offset=0.0, "
      "bool centred=False, "
      "bool all_heads=False, "
      "Tensor? query_bias=None, "
      "Tensor? key_bias=None, "
      "Tensor? cos=None, "
      "Tensor? sin=None, "
      "str numerics=\"float32\", "
      "bool round_before_weight=True";
  define(m, "norm_rotary(Tensor query, Tensor key, " + arguments + ") -> (Tensor, Tensor)");
  define(m, "norm_rotary_(Tensor(a!) query, Tensor(b!) key, " + arguments + ") -> ()");
  define(m, "norm_rotary_forward(Tensor query, Tensor key, " + arguments +
                ") -> (Tensor, Tensor, Tensor, Tensor)");
  define(m,
         "norm_rotary_backward("
         "Tensor query_gradient, "
         "Tensor key_gradient, "
         "Tensor query_rstd, "
         "Tensor key_rstd, "
         "Tensor query, "
         "Tensor key, " +
             arguments + ") -> (Tensor, Tensor, Tensor, Tensor)");
  const std::string in_packed = "int heads, int key_heads, str order, " + arguments;
  define(m, "norm_rotary_packed(Tensor qkv, " + in_packed + ") -> (Tensor, Tensor, Tensor)");
  define(m, "norm_rotary_packed_(Tensor(a!) qkv, " + in_packed + ") -> ()");
  define(m,
         "norm_rotary_packed_backward(Tensor query_gradient, Tensor key_gradient, "
         "Tensor value_gradient, Tensor query_rstd, Tensor key_rstd, Tensor qkv, " +
             in_packed + ") -> (Tensor, Tensor, Tensor)");
  norm_rotary.implement<prepare, compute>(m);
  norm_rotary.autocast<autocast>(m);
  norm_rotary_.implement<check_in_place, compute_in_place>(m);
  norm_rotary_.autocast<autocast_in_place>(m);
  norm_rotary_forward.implement<prepare_forward, forward>(m);
  norm_rotary_backward.implement<prepare_backward, backward>(m);
  norm_rotary.differentiate<pair_autograd>(m);
  norm_rotary_.refuse_gradients(m);
  norm_rotary_forward.differentiate<forward_autograd>(m);
  norm_rotary_backward.differentiate<backward_autograd>(m);
  norm_rotary_packed.compose_batched<packed>(m);
  norm_rotary_packed.autocast<packed_autocast>(m);
  norm_rotary_packed_.compose_batched<packed_in_place>(m);
  norm_rotary_packed_backward.implement<prepare_packed_backward, packed_backward>(m);
  norm_rotary_packed_backward.differentiate<packed_backward_autograd>(m);
}

}  // namespace posembed::rotary_norm
