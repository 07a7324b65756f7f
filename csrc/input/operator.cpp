// The input operators: token + type + position rows, norm and dropout in one kernel, and the way
// back in another, which gathers the sum and draws the dropout mask again instead of having kept
// them.
#include "input/operator.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>

#include "core/index_range.h"
#include "dispatcher/autocast.h"
#include "dispatcher/checks.h"
#include "dispatcher/cuda_scope.h"
#include "dispatcher/output_memory.h"
#include "dispatcher/parallel.h"
#include "input/kernel.h"
#include "learned/operator.h"
#include "sinusoidal/operator.h"
#include "sinusoidal/specification.h"
#include "token/operator.h"

namespace posembed::input {
namespace {

// ------------------------------------------------------------------------------------- checks

/// A further table must match the token table.
void check_like_token(const Tensor& tensor, const char* argument, const Tensor& token) {
  dispatcher::check_same_dtype(tensor, argument, token, "token");
  dispatcher::check_same_device(tensor, argument, token, "token");
  dispatcher::check_size(tensor.sym_size(-1), token.sym_size(1), argument, "embedding_dim");
}

void check_token(const Input& in) {
  // token: [num_embeddings, embedding_dim], ids: [batch, seq]
  dispatcher::check_floating(in.token, "token");
  dispatcher::check_rank(in.token, "token", 2, "[num_embeddings, embedding_dim]");
  dispatcher::check_integers(in.ids, "ids");
  dispatcher::check_rank(in.ids, "ids", 2, "[batch, seq]");
  dispatcher::check_same_device(in.ids, "ids", in.token, "token");
  if (!has_own_rows(in)) return token::check_gradient_form(in.gradient);
  TORCH_CHECK_VALUE(in.padding_idx == -1 && in.token.sym_size(0) == in.ids.sym_numel(),
                    "gradient: expected no padding_idx and a row of token for each id with 'own', ",
                    "got padding_idx ", in.padding_idx, ", ", in.token.sym_size(0), " rows and ",
                    in.ids.sym_numel(), " ids");
}

void check_position(const Input& in) {
  const bool sinusoidal = !in.sinusoid.empty();
  TORCH_CHECK_VALUE(!sinusoidal || !in.position.has_value(),
                    "position: expected no table beside a sinusoid");
  TORCH_CHECK_VALUE(sinusoidal || in.position.has_value() || !in.positions.has_value(),
                    "positions: expected none without position or sinusoid");
  learned::check_positions(in.positions, in.ids.sym_size(0), in.ids.sym_size(1), in.offset);
  if (in.positions.has_value()) {
    dispatcher::check_same_device(*in.positions, "positions", in.token, "token");
  }
  if (sinusoidal) {
    const int64_t width = sinusoidal::specification(in.sinusoid).spec.embedding_dim;
    dispatcher::check_size(width, in.token.sym_size(1), "sinusoid", "embedding_dim");
  }
  TORCH_CHECK_VALUE(in.position_padding_idx >= -1 && in.position_padding_idx < in.first_row,
                    "position_padding_idx: expected -1 (none) or a row before first_row, ",
                    in.first_row, ", got ", in.position_padding_idx);
  if (!in.position.has_value()) return;
  learned::check_table(*in.position, "position", in.first_row);
  check_like_token(*in.position, "position", in.token);
}

void check_type(const Input& in) {
  TORCH_CHECK_VALUE(in.token_type.has_value() || !in.types.has_value(),
                    "types: expected none without token_type");
  if (!in.token_type.has_value()) return;
  dispatcher::check_rank(*in.token_type, "token_type", 2, "[num_types, embedding_dim]");
  check_like_token(*in.token_type, "token_type", in.token);
  if (!in.types.has_value()) {
    TORCH_CHECK_VALUE(in.token_type->sym_size(0) > 0, "token_type: expected a row for type 0");
    return;
  }
  dispatcher::check_integers(*in.types, "types");
  dispatcher::check_same_device(*in.types, "types", in.token, "token");
  TORCH_CHECK_VALUE(in.types->sym_sizes() == in.ids.sym_sizes(),
                    "types: expected the shape of ids, ", in.ids.sym_sizes(), ", got ",
                    in.types->sym_sizes());
}

void check_norm(const Input& in) {
  TORCH_CHECK_VALUE(in.norm == "none" || in.norm == "layer" || in.norm == "rms",
                    "norm: expected 'none', 'layer' or 'rms', got '", in.norm, "'");
  TORCH_CHECK_VALUE(norms(in) || !in.norm_weight.has_value(),
                    "norm_weight: expected none where norm is 'none'");
  TORCH_CHECK_VALUE(in.norm == "layer" || !in.norm_bias.has_value(),
                    "norm_bias: expected none unless norm is 'layer'");
  TORCH_CHECK_VALUE(in.norm_weight.has_value() || !in.norm_bias.has_value(),
                    "norm_bias: expected none without norm_weight");
  if (in.norm_weight.has_value()) {
    dispatcher::check_rank(*in.norm_weight, "norm_weight", 1, "[embedding_dim]");
    check_like_token(*in.norm_weight, "norm_weight", in.token);
  }
  if (in.norm_bias.has_value()) {
    dispatcher::check_rank(*in.norm_bias, "norm_bias", 1, "[embedding_dim]");
    check_like_token(*in.norm_bias, "norm_bias", in.token);
  }
}

void check_dropout(const Tensor& x, const MaybeTensor& seed, double probability) {
  TORCH_CHECK_VALUE(probability >= 0 && probability <= 1, "dropout: expected 0 to 1, got ",
                    probability);
  if (!seed.has_value()) return;
  TORCH_CHECK_TYPE(seed->scalar_type() == at::kLong, "seed: expected int64, got ",
                   seed->scalar_type());
  TORCH_CHECK_VALUE(seed->sym_numel() == 1, "seed: expected one element, got ", seed->sym_sizes());
  dispatcher::check_same_device(*seed, "seed", x, "the data");
}

/// Everything that eager and Meta kernels check alike.
void check(const Input& in) {
  check_token(in);
  check_position(in);
  check_type(in);
  check_norm(in);
  check_dropout(in.token, in.seed, in.dropout);
}

/// CPU indices are looked at before anything is written; a CUDA kernel records what it meets.
void check_range(const Tensor& values, const char* argument, const Tensor& table,
                 const char* table_name) {
  const core::IndexView view = dispatcher::index_view(values);
  const int64_t rows = table.size(0);
  const int64_t place = core::find_outside(view, values.numel(), 0, rows);
  TORCH_CHECK_INDEX(place < 0, argument, ": expected 0 to ", rows - 1, ", a row of the ",
                    table_name, " table of ", rows, ", got ", core::read(view, place), " at place ",
                    place);
}

// ---------------------------------------------------------------------------------- the kernel

/// The arguments as the kernel reads them, and the tensors that they point into.
struct Prepared {
  Arguments arguments;
  Tensor token, ids, position, positions, token_type, types, weight, bias, encoding;
};

Table table(const Tensor& data, const Tensor& index, core::ErrorKind kind) {
  Table result;
  result.data = data.const_data_ptr();
  result.rows = data.size(0);
  result.stride = data.stride(0);
  result.kind = kind;
  if (index.defined()) result.index = dispatcher::index_view(index);
  return result;
}

/// On the CPU: a row of its own for each id.
void check_order(const Tensor& ids) {
  const core::IndexView view = dispatcher::index_view(ids);
  for (int64_t place = 0; place < ids.numel(); ++place) {
    TORCH_CHECK_VALUE(core::read(view, place) == place,
                      "ids: expected 0, 1, … with gradient 'own', ", "got ",
                      core::read(view, place), " at place ", place);
  }
}

void prepare_token(const Input& in, Prepared& prepared) {
  prepared.token = token::with_dense_rows(in.token);
  prepared.ids = in.ids.contiguous();
  if (!in.token.is_cuda()) {
    check_range(prepared.ids, "ids", in.token, "token");
    if (has_own_rows(in)) check_order(prepared.ids);
  }
  Table& token = prepared.arguments.token;
  token = table(prepared.token, prepared.ids, core::ErrorKind::token_id);
  token.index_stride[0] = in.ids.size(1);
  token.index_stride[1] = 1;
}

void prepare_type(const Input& in, Prepared& prepared) {
  if (!in.token_type.has_value()) return;
  prepared.token_type = token::with_dense_rows(*in.token_type);
  const bool given = in.types.has_value();
  // Type 0 for every token: one number, read again and again.
  prepared.types = given ? in.types->contiguous() : at::zeros({1}, in.ids.options());
  if (given && !in.token.is_cuda())
    check_range(prepared.types, "types", *in.token_type, "token type");
  Table& type = prepared.arguments.type;
  type = table(prepared.token_type, prepared.types, core::ErrorKind::token_type);
  type.index_stride[0] = given ? in.ids.size(1) : 0;
  type.index_stride[1] = given ? 1 : 0;
}

/// Which places positions come from, for a table and for sinusoids alike.
void prepare_places(const Input& in, Prepared& prepared) {
  Table& position = prepared.arguments.position;
  position.offset = in.offset.expect_int();
  if (!in.positions.has_value()) return;
  prepared.positions = in.positions->contiguous();
  position.index = dispatcher::index_view(prepared.positions);
  const bool shared = prepared.positions.dim() == 1 || prepared.positions.size(0) == 1;
  position.index_stride[0] = shared ? 0 : in.ids.size(1);
  position.index_stride[1] = 1;
}

void prepare_sinusoid(const Input& in, Prepared& prepared) {
  if (in.sinusoid.empty()) return;
  Arguments& arguments = prepared.arguments;
  const sinusoidal::Sinusoid sinusoid = sinusoidal::specification(in.sinusoid).sinusoid();
  if (!in.token.is_cuda() || sinusoid.pairs <= most_pairs_cuda(arguments.scalar)) {
    arguments.sinusoid = sinusoid;
    return;
  }
  prepared.encoding = encoding(in).contiguous();
  arguments.encoding = prepared.encoding.const_data_ptr();
  const bool shared = prepared.encoding.dim() == 2 || prepared.encoding.size(0) == 1;
  arguments.encoding_stride[0] = shared ? 0 : in.ids.size(1) * in.token.size(1);
  arguments.encoding_stride[1] = in.token.size(1);
}

void prepare_position(const Input& in, Prepared& prepared) {
  if (!in.position.has_value()) return;
  prepared.position = token::with_dense_rows(*in.position);
  const int64_t rows = in.position->size(0);
  if (!in.positions.has_value()) {
    learned::check_length(in.offset.expect_int(), in.ids.size(1), rows, in.first_row);
  } else if (!in.token.is_cuda()) {
    learned::check_position_values(prepared.positions, rows, in.first_row);
  }
  Table& position = prepared.arguments.position;
  position.data = prepared.position.const_data_ptr();
  position.rows = rows;
  position.stride = prepared.position.stride(0);
  position.first_row = in.first_row;
  position.kind = core::ErrorKind::position;
}

void prepare_norm(const Input& in, Prepared& prepared) {
  Arguments& arguments = prepared.arguments;
  arguments.norm = in.norm == "layer" ? Norm::layer : in.norm == "rms" ? Norm::rms : Norm::none;
  arguments.eps = in.eps;
  if (in.norm_weight.has_value()) {
    prepared.weight = in.norm_weight->contiguous();
    arguments.norm_weight = prepared.weight.const_data_ptr();
  }
  if (in.norm_bias.has_value()) {
    prepared.bias = in.norm_bias->contiguous();
    arguments.norm_bias = prepared.bias.const_data_ptr();
  }
}

Prepared prepare(const Input& in) {
  Prepared prepared;
  Arguments& arguments = prepared.arguments;
  arguments.scalar = dispatcher::scalar_of(in.token);
  arguments.batch = in.ids.size(0);
  arguments.seq = in.ids.size(1);
  arguments.embedding_dim = in.token.size(1);
  arguments.scale = in.scale;
  prepare_token(in, prepared);
  prepare_type(in, prepared);
  prepare_places(in, prepared);
  prepare_sinusoid(in, prepared);
  prepare_position(in, prepared);
  prepare_norm(in, prepared);
  if (drops(in)) {
    arguments.dropout = in.dropout;
    arguments.seed = in.seed->const_data_ptr<int64_t>();
  }
  return prepared;
}

c10::SymDimVector output_sizes(const Input& in) {
  return {in.ids.sym_size(0), in.ids.sym_size(1), in.token.sym_size(1)};
}

// ------------------------------------------------------------------------------------- forward

void launch(ForwardArguments& arguments, const Tensor& out) {
  arguments.out = out.mutable_data_ptr();
  if (out.is_cuda()) {
    if constexpr (core::built_with_cuda) {
      const dispatcher::CudaScope scope(out);
      arguments.input.error = dispatcher::device_error();
      dispatcher::check_launch(forward_cuda(arguments, scope.stream()));
    }
    return;
  }
  const Arguments& in = arguments.input;
  dispatcher::parallel_for(
      in.batch * in.seq, 4 * in.embedding_dim * core::size_of(in.scalar),
      [&arguments](int64_t begin, int64_t end) { forward_cpu(arguments, begin, end); });
}

Tensor input_embedding(const Input& in) {
  check(in);
  const Prepared prepared = prepare(in);
  Tensor out = dispatcher::empty_symint(output_sizes(in), in.token.options());
  ForwardArguments arguments;
  arguments.input = prepared.arguments;
  launch(arguments, out);
  return out;
}

/// Uninitialised statistics: mean is empty unless the norm has one, both are without a norm.
std::pair<Tensor, Tensor> statistics(const Input& in) {
  const auto options = in.token.options().dtype(compute_type(in.token));
  const c10::SymDimVector none = {0}, all = {in.ids.sym_size(0), in.ids.sym_size(1)};
  return {at::empty_symint(in.norm == "layer" ? all : none, options),
          at::empty_symint(norms(in) ? all : none, options)};
}

Forward input_embedding_forward(const Input& in) {
  check(in);
  const Prepared prepared = prepare(in);
  Tensor out = dispatcher::empty_symint(output_sizes(in), in.token.options());
  auto [mean, rstd] = statistics(in);
  ForwardArguments arguments;
  arguments.input = prepared.arguments;
  if (in.norm == "layer") arguments.mean = mean.mutable_data_ptr();
  if (norms(in)) arguments.rstd = rstd.mutable_data_ptr();
  launch(arguments, out);
  return {out, mean, rstd};
}

// ------------------------------------------------------------------------------------ backward

void check_backward(const Tensor& gradient, const Input& in) {
  check(in);
  dispatcher::check_same_dtype(gradient, "output_gradient", in.token, "token");
  dispatcher::check_same_device(gradient, "output_gradient", in.token, "token");
  TORCH_CHECK_VALUE(gradient.sym_sizes() == c10::SymIntArrayRef(output_sizes(in)),
                    "output_gradient: expected [batch, seq, embedding_dim], got ",
                    gradient.sym_sizes());
}

/// What forward kept: [batch, seq] in the type of the arithmetic.
void check_statistic(const Tensor& kept, const char* argument, const Input& in) {
  TORCH_CHECK_TYPE(kept.scalar_type() == compute_type(in.token), argument, ": expected ",
                   compute_type(in.token), ", got ", kept.scalar_type());
  dispatcher::check_same_device(kept, argument, in.token, "token");
  TORCH_CHECK_VALUE(kept.sym_sizes() == in.ids.sym_sizes(), argument,
                    ": expected the shape of ids, ", in.ids.sym_sizes(), ", got ",
                    kept.sym_sizes());
}

void launch(BackwardArguments& arguments, const Tensor& gradient) {
  if (gradient.is_cuda()) {
    if constexpr (core::built_with_cuda) {
      const dispatcher::CudaScope scope(gradient);
      arguments.input.error = dispatcher::device_error();
      dispatcher::check_launch(backward_cuda(arguments, scope.stream()));
    }
    return;
  }
  const int64_t part_bytes = 4 * gradient.numel() / arguments.parts * gradient.element_size();
  dispatcher::parallel_for(arguments.parts, part_bytes, [&arguments](int64_t begin, int64_t end) {
    backward_cpu(arguments, begin, end);
  });
  if (arguments.partial == nullptr) return;
  dispatcher::parallel_for(
      sums_of(arguments), gradient.size(2) * arguments.parts * int64_t{sizeof(float)},
      [&arguments](int64_t begin, int64_t end) { add_parts_cpu(arguments, begin, end); });
}

/// Uninitialised results; see Backward.
Backward backward_results(const Input& in) {
  const auto options = in.token.options();
  const c10::SymInt dim = in.token.sym_size(1);
  const auto make = [&](bool wanted, const c10::SymDimVector& sizes) {
    return dispatcher::empty_symint(wanted ? sizes : c10::SymDimVector{0}, options);
  };
  const auto table = [&](bool wanted, const MaybeTensor& rows) {
    return make(wanted, wanted ? c10::SymDimVector{rows->sym_size(0), dim} : c10::SymDimVector{});
  };
  return {make(norms(in) || drops(in), output_sizes(in)), make(in.norm_weight.has_value(), {dim}),
          make(in.norm_bias.has_value(), {dim}), table(counts_positions(in), in.position),
          table(has_few_types(in), in.token_type)};
}

/// Where a result goes; nullptr: it is not wanted.
void* target(const Tensor& result) {
  return result.numel() == 0 ? nullptr : result.mutable_data_ptr();
}

/// Memory for partial sums, if any is wanted.
Tensor make_partial(BackwardArguments& arguments, const Tensor& like) {
  if (arguments.weight_gradient == nullptr && arguments.type_gradient == nullptr) return {};
  Tensor partial = at::empty({arguments.parts, sums_of(arguments), partial_columns(like.size(2))},
                             like.options().dtype(compute_type(like)));
  arguments.partial = partial.mutable_data_ptr();
  return partial;
}

/// The position table's gradient where the kernel has not summed it: where a sequence is too short
/// to be shared out among threads.
void sum_positions(const Input& in, const Tensor& gradient, const Tensor& out) {
  out.copy_(learned::call_learned_backward(gradient, std::nullopt, out.sym_size(0), in.offset,
                                           in.first_row));
}

/// Lets the kernel write the rows of the sequence's positions; all others are zero.
void* begin_positions(const Input& in, const Tensor& out) {
  const int64_t first = in.offset.expect_int() + in.first_row, end = first + in.ids.size(1);
  out.narrow(0, 0, first).zero_();
  out.narrow(0, end, out.size(0) - end).zero_();
  return target(out.narrow(0, first, in.ids.size(1)));
}

Backward input_embedding_backward(const Input& in, const Tensor& gradient, const Tensor& mean,
                                  const Tensor& rstd) {
  check_backward(gradient, in);
  if (in.norm == "layer") check_statistic(mean, "mean", in);
  if (norms(in)) check_statistic(rstd, "rstd", in);
  const Prepared prepared = prepare(in);
  const Tensor rows = gradient.contiguous(), means = mean.contiguous(), rstds = rstd.contiguous();
  Backward results = backward_results(in);
  auto& [sum, weight, bias, position, type] = results;
  BackwardArguments arguments;
  arguments.input = prepared.arguments;
  arguments.gradient = rows.const_data_ptr();
  if (in.norm == "layer") arguments.mean = means.const_data_ptr();
  if (norms(in)) arguments.rstd = rstds.const_data_ptr();
  arguments.sum_gradient = target(sum);
  arguments.weight_gradient = target(weight);
  arguments.bias_gradient = target(bias);
  arguments.type_gradient = target(type);
  const int64_t most = gradient.is_cuda() ? parts_cuda : parts_cpu;
  const bool fused =
      counts_positions(in) && !gradient.is_cuda() && in.ids.numel() > 0 && in.ids.size(1) >= most;
  if (fused) arguments.position_gradient = begin_positions(in, position);
  arguments.parts = std::clamp<int64_t>(in.ids.numel(), 1, most);
  const Tensor partial = make_partial(arguments, rows);
  launch(arguments, gradient);
  if (counts_positions(in) && !fused) {
    sum_positions(in, sum.numel() == 0 ? rows : sum, position);
  }
  return results;
}

// ------------------------------------------------------------------------------------- dropout

Tensor input_dropout(const Tensor& x, const Tensor& seed, double probability) {
  dispatcher::check_floating(x, "x");
  check_dropout(x, seed, probability);
  const Tensor in = x.contiguous();
  Tensor out = dispatcher::empty(x.sizes(), x.options());
  const DropoutArguments arguments{
      in.const_data_ptr(), out.mutable_data_ptr(),        dispatcher::scalar_of(x), in.numel(),
      probability,         seed.const_data_ptr<int64_t>()};
  if (x.is_cuda()) {
    if constexpr (core::built_with_cuda) {
      const dispatcher::CudaScope scope(x);
      dispatcher::check_launch(drop_cuda(arguments, scope.stream()));
    }
    return out;
  }
  dispatcher::parallel_for(
      arguments.count, 4 * core::size_of(arguments.scalar),
      [&arguments](int64_t begin, int64_t end) { drop_cpu(arguments, begin, end); });
  return out;
}

// ---------------------------------------------------------------------------------------- Meta

Tensor input_embedding_meta(const Input& in) {
  check(in);
  return at::empty_symint(output_sizes(in), in.token.options());
}

Forward input_embedding_forward_meta(const Input& in) {
  auto [mean, rstd] = statistics(in);
  return {input_embedding_meta(in), mean, rstd};
}

Backward input_embedding_backward_meta(const Input& in, const Tensor& gradient, const Tensor&,
                                       const Tensor&) {
  check_backward(gradient, in);
  return backward_results(in);
}

Tensor input_dropout_meta(const Tensor& x, const Tensor& seed, double probability) {
  dispatcher::check_floating(x, "x");
  check_dropout(x, seed, probability);
  return at::empty_symint(x.sym_sizes(), x.options());
}

// ------------------------------------------------------------------------------------ autocast

Tensor input_embedding_autocast(const Input& given) {
  const dispatcher::PastAutocast past(c10::autocast_dispatch_keyset);
  Input in = given;
  for (MaybeTensor* parameter : {&in.position, &in.token_type, &in.norm_weight, &in.norm_bias}) {
    *parameter = dispatcher::follow(*parameter, in.token);
  }
  return call_input_embedding(in);
}

void register_kernels(torch::Library& m) {
  m.impl("input_embedding", Spread<input_embedding>::call);
  m.impl("input_embedding_forward", Spread<input_embedding_forward>::call);
  m.impl("input_embedding_backward", Spread<input_embedding_backward>::call);
  m.impl("input_dropout", input_dropout);
}

}  // namespace

Tensor encoding(const Input& in) {
  const Tensor positions = in.positions.has_value()
                               ? *in.positions
                               : at::arange(in.offset, in.offset + in.ids.sym_size(1),
                                            in.ids.options().dtype(at::kLong));
  return sinusoidal::call_encode(positions, std::nullopt, in.sinusoid, 0, compute_type(in.token));
}

TORCH_LIBRARY_IMPL(posembed, CPU, m) { register_kernels(m); }

#if defined(POSEMBED_WITH_CUDA)
TORCH_LIBRARY_IMPL(posembed, CUDA, m) { register_kernels(m); }
#endif

TORCH_LIBRARY_IMPL(posembed, AutocastCPU, m) {
  m.impl("input_embedding", Spread<input_embedding_autocast>::call);
}

TORCH_LIBRARY_IMPL(posembed, AutocastCUDA, m) {
  m.impl("input_embedding", Spread<input_embedding_autocast>::call);
}

TORCH_LIBRARY_IMPL(posembed, Meta, m) {
  m.impl("input_embedding", Spread<input_embedding_meta>::call);
  m.impl("input_embedding_forward", Spread<input_embedding_forward_meta>::call);
  m.impl("input_embedding_backward", Spread<input_embedding_backward_meta>::call);
  m.impl("input_dropout", input_dropout_meta);
}

}  // namespace posembed::input
