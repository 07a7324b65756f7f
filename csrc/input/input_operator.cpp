// The input operators: token + type + position rows, norm and dropout in one kernel. The backward
// kernel gathers the sum and draws the dropout mask again, so neither is saved.
#include "input/input_operator.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>

#include "core/index.h"
#include "dispatcher/autograd.h"
#include "dispatcher/checks.h"
#include "dispatcher/launch.h"
#include "dispatcher/output_memory.h"
#include "dispatcher/tensors.h"
#include "input/input.h"
#include "learned/learned_operator.h"
#include "sinusoidal/sinusoidal_operator.h"
#include "token/token_operator.h"

namespace posembed::input {
namespace {

// ----------------------------------------------------------------------------------------- checks
// Checks arguments, for eager and Meta kernels, then converts them to the form that kernels read.

/// The arguments as kernels read them, and the tensors that they point into.
struct Prepared {
  Arguments arguments;
  Tensor token, ids, position, positions, token_type, types, weight, bias, encoding;
  sinusoidal::SpecificationPointer sinusoid;
};

/// The pass that a kernel computes.
enum class Pass { forward, backward };

/// Checks that another table matches the token table.
void check_like_token(const Tensor& tensor, const char* argument, const Tensor& token) {
  dispatcher::check_same_dtype(tensor, argument, token, "token");
  dispatcher::check_size(tensor.sym_size(-1), token.sym_size(1), argument, "embedding_dim");
}

void check_token(const Input& in) {
  // token: [num_embeddings, embedding_dim], ids: [batch, seq]
  dispatcher::check_floating(in.token, "token");
  dispatcher::check_rank(in.token, "token", 2, "[num_embeddings, embedding_dim]");
  dispatcher::check_integers(in.ids, "ids");
  dispatcher::check_rank(in.ids, "ids", 2, "[batch, seq]");
  if (!in.own_rows) return;
  TORCH_CHECK_VALUE(in.padding_idx() == -1 && in.token.sym_size(0) == in.ids.sym_numel(),
                    "own_rows: expected no padding_idx and a row of token for each id, ",
                    "got padding_idx ", in.padding_idx(), ", ", in.token.sym_size(0), " rows and ",
                    in.ids.sym_numel(), " ids");
}

void check_position(const Input& in) {
  const bool sinusoidal = !in.sinusoid().empty();
  TORCH_CHECK_VALUE(!sinusoidal || !in.position().has_value(),
                    "position: expected no table beside a sinusoid");
  TORCH_CHECK_VALUE(
      sinusoidal || in.position().has_value() || !in.positions().has_value(),
      "positions: expected none where there is no table of positions and no sinusoid");
  learned::check_positions(in.positions(), in.ids.sym_size(0), in.ids.sym_size(1),
                           in.offset().number());
  dispatcher::sum(in.offset().number(), in.ids.sym_size(1), "offset");
  if (sinusoidal) {
    const int64_t width = sinusoidal::specification_of_one_axis(in.sinusoid())->spec.embedding_dim;
    dispatcher::check_size(width, in.token.sym_size(1), "sinusoid", "embedding_dim");
  }
  TORCH_CHECK_VALUE(in.position_padding_idx() >= -1 && in.position_padding_idx() < in.first_row(),
                    "position_padding_idx: expected -1 (none) or a row before first_row, ",
                    in.first_row(), ", got ", in.position_padding_idx());
  if (!in.position().has_value()) return;
  learned::check_table(*in.position(), "position", in.first_row());
  check_like_token(*in.position(), "position", in.token);
  if (in.positions().has_value()) return;
  learned::check_length(in.offset().number(), in.ids.sym_size(1), in.position()->sym_size(0),
                        in.first_row());
}

void check_type(const Input& in) {
  TORCH_CHECK_VALUE(in.token_type().has_value() || !in.types().has_value(),
                    "types: expected none where there is no table of token types");
  if (!in.token_type().has_value()) return;
  dispatcher::check_rank(*in.token_type(), "token_type", 2, "[num_types, embedding_dim]");
  check_like_token(*in.token_type(), "token_type", in.token);
  if (!in.types().has_value()) {
    TORCH_CHECK_VALUE(in.token_type()->sym_size(0) > 0, "token_type: expected a row for type 0");
    return;
  }
  dispatcher::check_integers(*in.types(), "types");
  dispatcher::check_same_shape(*in.types(), "types", in.ids, "ids");
}

void check_norm(const Input& in) {
  TORCH_CHECK_VALUE(norms(in) || !in.norm_weight().has_value(),
                    "norm_weight: expected none where norm is 'none'");
  TORCH_CHECK_VALUE(in.norm() == InputNorm::layer || !in.norm_bias().has_value(),
                    "norm_bias: expected none unless norm is 'layer'");
  TORCH_CHECK_VALUE(in.norm_weight().has_value() || !in.norm_bias().has_value(),
                    "norm_bias: expected none without norm_weight");
  dispatcher::check_eps(in.eps());
  const auto check_row = [&in](const MaybeTensor& row, const char* argument) {
    if (!row.has_value()) return;
    dispatcher::check_rank(*row, argument, 1, "[embedding_dim]");
    check_like_token(*row, argument, in.token);
  };
  check_row(in.norm_weight(), "norm_weight");
  check_row(in.norm_bias(), "norm_bias");
}

/// Checks indices on the CPU before anything is written; CUDA kernels record bad ones, except those
/// of a table without rows, which has no address.
void check_range(const Tensor& values, const char* argument, const Tensor& table,
                 const char* table_name) {
  if (dispatcher::on_cuda(table)) {
    TORCH_CHECK_INDEX(table.size(0) > 0 || values.numel() == 0, argument,
                      ": expected none, because the ", table_name, " table has no rows, got ",
                      values.numel());
    return;
  }
  const core::IndexView view = dispatcher::index_view(values);
  const int64_t rows = table.size(0);
  const int64_t index = core::find_outside(view, values.numel(), 0, rows);
  TORCH_CHECK_INDEX(index < 0, argument, ": expected 0 to ", rows - 1, ", a row of the ",
                    table_name, " table of ", rows, ", got ", core::read(view, index), " at index ",
                    index);
}

Table table(const Tensor& data, const Tensor& index, core::ErrorKind kind) {
  Table result;
  result.data = data.const_data_ptr();
  result.rows = data.size(0);
  result.stride = data.stride(0);
  result.kind = kind;
  if (index.defined()) result.index = dispatcher::index_view(index);
  return result;
}

/// Checks, on the CPU, that ids are 0, 1, …
void check_order(const Tensor& ids) {
  const core::IndexView view = dispatcher::index_view(ids);
  for (int64_t index = 0; index < ids.numel(); ++index) {
    TORCH_CHECK_VALUE(core::read(view, index) == index, "ids: expected 0, 1, … with own_rows, got ",
                      core::read(view, index), " at index ", index);
  }
}

void prepare_token(const Input& in, Prepared& prepared) {
  prepared.token = dispatcher::with_contiguous_last_dim(in.token);
  prepared.ids = in.ids.contiguous();
  check_range(prepared.ids, "ids", in.token, "token");
  if (in.own_rows && !dispatcher::on_cuda(in.token)) check_order(prepared.ids);
  Table& token = prepared.arguments.token;
  token = table(prepared.token, prepared.ids, core::ErrorKind::token_id);
  token.index_stride[0] = in.ids.size(1);
  token.index_stride[1] = 1;
}

void prepare_type(const Input& in, Prepared& prepared) {
  if (!in.token_type().has_value()) return;
  prepared.token_type = dispatcher::with_contiguous_last_dim(*in.token_type());
  const bool has_types = in.types().has_value();
  if (has_types) prepared.types = in.types()->contiguous();
  if (has_types) check_range(prepared.types, "types", *in.token_type(), "token type");
  Table& type = prepared.arguments.type;
  type = table(prepared.token_type, prepared.types, core::ErrorKind::token_type);
  // If no types are given, every token has type 0.
  type.index_stride[0] = has_types ? in.ids.size(1) : 0;
  type.index_stride[1] = has_types ? 1 : 0;
}

/// The position of each token, for a table or for sinusoids.
void prepare_position(const Input& in, Prepared& prepared) {
  Table& position = prepared.arguments.position;
  position.offset = in.offset().number().expect_int();
  if (in.positions().has_value()) {
    prepared.positions = in.positions()->contiguous();
    position.index = dispatcher::index_view(prepared.positions);
    const bool shared = prepared.positions.dim() == 1 || prepared.positions.size(0) == 1;
    position.index_stride[0] = shared ? 0 : in.ids.size(1);
    position.index_stride[1] = 1;
  }
  if (!in.position().has_value()) return;
  prepared.position = dispatcher::with_contiguous_last_dim(*in.position());
  const int64_t rows = in.position()->size(0);
  if (in.positions().has_value() && dispatcher::on_cuda(in.token)) {
    check_range(prepared.positions, "positions", *in.position(), "position");
  } else if (in.positions().has_value()) {
    learned::check_position_values(prepared.positions, rows, in.first_row());
  }
  position.data = prepared.position.const_data_ptr();
  position.rows = rows;
  position.stride = prepared.position.stride(0);
  position.first_row = in.first_row();
  position.kind = core::ErrorKind::position;
}

/// Whether the kernels take the call.
bool is_taken(const Input& in, const Arguments& arguments) {
  if constexpr (core::built_with_cuda) {
    return !dispatcher::on_cuda(in.token) || takes_cuda(arguments);
  }
  return true;
}

/// The sinusoid, or its values where neither the kernel nor the chain in its place computes it.
void prepare_sinusoid(const Input& in, Pass pass, Prepared& prepared) {
  if (in.sinusoid().empty()) return;
  Arguments& arguments = prepared.arguments;
  prepared.sinusoid = sinusoidal::specification(in.sinusoid());
  arguments.sinusoid = prepared.sinusoid->sinusoid();
  if (!dispatcher::on_cuda(in.token) || !is_taken(in, arguments)) return;
  if constexpr (core::built_with_cuda) {
    if (pass == Pass::forward && computes_sinusoid_cuda(arguments)) return;
  }
  arguments.sinusoid = {};
  prepared.encoding = encoding(in).contiguous();
  arguments.encoding = prepared.encoding.const_data_ptr();
  const bool shared = prepared.encoding.dim() == 2 || prepared.encoding.size(0) == 1;
  arguments.encoding_stride[0] = shared ? 0 : in.ids.size(1) * in.token.size(1);
  arguments.encoding_stride[1] = in.token.size(1);
}

void prepare_norm(const Input& in, Prepared& prepared) {
  Arguments& arguments = prepared.arguments;
  arguments.norm = static_cast<Norm>(in.norm());  // the same in both enumerations
  arguments.eps = in.eps();
  if (in.norm_weight().has_value()) {
    prepared.weight = in.norm_weight()->contiguous();
    arguments.norm_weight = prepared.weight.const_data_ptr();
  }
  if (in.norm_bias().has_value()) {
    prepared.bias = in.norm_bias()->contiguous();
    arguments.norm_bias = prepared.bias.const_data_ptr();
  }
}

/// The checks for dropout alone. `first`, named `argument`, is the index of the first element in
/// the mask.
void check_dropout(const MaybeTensor& seed, double probability, const c10::SymInt& first,
                   const char* argument) {
  TORCH_CHECK_VALUE(probability >= 0 && probability <= 1, "dropout: expected 0 to 1, got ",
                    probability);
  TORCH_CHECK_VALUE(first >= 0, argument, ": expected 0 or more, got ", first);
  if (!seed.has_value()) return;
  TORCH_CHECK_TYPE(seed->scalar_type() == at::kLong, "seed: expected int64, got ",
                   dispatcher::dtype_name(seed->scalar_type()));
  TORCH_CHECK_VALUE(seed->sym_numel() == 1, "seed: expected one element, got ", seed->sym_sizes());
}

/// The checks that need no data; Meta kernels run them too.
void check(const Input& in) {
  check_token(in);
  check_position(in);
  check_type(in);
  check_norm(in);
  check_dropout(in.seed(), in.dropout(), in.first_token(), "first_token");
}

/// Requires check(in). On the CPU also checks the values of ids, positions and types: raises
/// c10::IndexError.
Prepared prepare(const Input& in, Pass pass) {
  Prepared prepared;
  Arguments& arguments = prepared.arguments;
  arguments.scalar = dispatcher::scalar_of(in.token);
  arguments.batch = in.ids.size(0);
  arguments.seq = in.ids.size(1);
  arguments.embedding_dim = in.token.size(1);
  arguments.scale = in.scale();
  // Recording bad indices again would make later operators of the same backward pass raise.
  if (pass == Pass::forward) arguments.error = dispatcher::device_error(in.token.device());
  prepare_token(in, prepared);
  prepare_type(in, prepared);
  prepare_position(in, prepared);
  prepare_norm(in, prepared);
  if (drops(in)) {
    arguments.dropout = in.dropout();
    arguments.first_element = in.first_token().expect_int() * arguments.embedding_dim;
    arguments.seed = in.seed()->const_data_ptr<int64_t>();
  }
  prepare_sinusoid(in, pass, prepared);  // last: depends on the others
  return prepared;
}

c10::SymDimVector output_sizes(const Input& in) {
  return {in.ids.sym_size(0), in.ids.sym_size(1), in.token.sym_size(1)};
}

// ------------------------------------------------------------------------------------- forward

/// The address of a result; nullptr: not needed.
void* target(const Tensor& result) {
  return result.defined() && result.numel() > 0 ? result.mutable_data_ptr() : nullptr;
}

void launch(ForwardArguments& arguments, const Tensor& out) {
  const Arguments& in = arguments.input;
  arguments.out = out.mutable_data_ptr();
  dispatcher::launch(arguments, out, in.batch * in.seq,
                     4 * in.embedding_dim * core::size_of(in.scalar), forward_cpu,
                     POSEMBED_CUDA_LAUNCHER(forward_cuda));
}

Tensor empty_output(const Input& in) {
  check(in);
  return dispatcher::empty_symint(output_sizes(in), in.token.options());
}

/// Whether an index of a token is outside its table, [batch, seq, 1]. The kernel sums one column, a
/// one of every token, and in forward records such an index.
Tensor find_outside(const Prepared& prepared) {
  const Arguments& all = prepared.arguments;
  TORCH_CHECK_VALUE(all.batch * all.seq < int64_t{1} << 31,
                    "ids: expected fewer than 2^31 tokens on CUDA, got ", all.batch * all.seq);
  const Tensor one = at::ones({1}, prepared.token.options()), zero = at::zeros_like(one);
  const auto column = [](Table table, const Tensor& value) {
    if (table.data != nullptr) table.data = value.const_data_ptr();
    table.stride = 0;
    return table;
  };
  ForwardArguments arguments;
  Arguments& in = arguments.input;
  in.scalar = all.scalar;
  in.batch = all.batch;
  in.seq = all.seq;
  in.embedding_dim = 1;
  in.token = column(all.token, one);
  in.type = column(all.type, zero);
  in.position = column(all.position, zero);
  in.error = all.error;
  const Tensor inside = at::empty({in.batch, in.seq, 1}, one.options());
  launch(arguments, inside);
  return at::eq(inside, 0);
}

/// The results of a call that no kernel takes.
Forward forward_by_parts(const Input& in, const Prepared& prepared) {
  Forward results = forward_chain(in);
  std::get<0>(results).masked_fill_(find_outside(prepared), 0);
  return results;
}

/// The statistics are both empty without a norm; the mean is empty for RMSNorm.
Forward empty_forward(const Input& in) {
  Tensor output = empty_output(in);
  const auto options = in.token.options().dtype(compute_type(in.token));
  const c10::SymDimVector none = {0}, all = {in.ids.sym_size(0), in.ids.sym_size(1)};
  return {std::move(output),
          dispatcher::empty_symint(in.norm() == InputNorm::layer ? all : none, options),
          dispatcher::empty_symint(norms(in) ? all : none, options)};
}

void forward(const Input& in, Forward& results) {
  const auto& [out, mean, rstd] = results;
  const Prepared prepared = prepare(in, Pass::forward);
  if (!is_taken(in, prepared.arguments)) {
    results = forward_by_parts(in, prepared);
    return;
  }
  ForwardArguments arguments;
  arguments.input = prepared.arguments;
  arguments.mean = target(mean);
  arguments.rstd = target(rstd);
  launch(arguments, out);
}

void fill_output(const Input& in, Tensor& out) {
  Forward results{out, {}, {}};
  forward(in, results);
  out = std::get<0>(results);
}

// ------------------------------------------------------------------------------------ backward

/// Checks statistics saved by forward: [batch, seq] in the compute type.
void check_statistic(const Tensor& kept, const char* argument, const Input& in) {
  TORCH_CHECK_TYPE(kept.scalar_type() == compute_type(in.token), argument, ": expected ",
                   dispatcher::dtype_name(compute_type(in.token)), ", got ",
                   dispatcher::dtype_name(kept.scalar_type()));
  dispatcher::check_same_shape(kept, argument, in.ids, "ids");
}

void check_backward(const Tensor& gradient, const Tensor& mean, const Tensor& rstd,
                    const Input& in) {
  check(in);
  dispatcher::check_same_dtype(gradient, "output_gradient", in.token, "token");
  TORCH_CHECK_VALUE(gradient.sym_sizes() == c10::SymIntArrayRef(output_sizes(in)),
                    "output_gradient: expected [batch, seq, embedding_dim], got ",
                    gradient.sym_sizes());
  if (in.norm() == InputNorm::layer) check_statistic(mean, "mean", in);
  if (norms(in)) check_statistic(rstd, "rstd", in);
}

void launch(BackwardArguments& arguments, const Tensor& gradient) {
  const int64_t part_bytes = 4 * gradient.numel() / arguments.parts * gradient.element_size();
  dispatcher::launch(arguments, gradient, arguments.parts, part_bytes, backward_cpu,
                     POSEMBED_CUDA_LAUNCHER(backward_cuda));
  if (dispatcher::on_cuda(gradient) || arguments.partial == nullptr) return;
  dispatcher::parallel_for(
      sums_of(arguments), gradient.size(2) * arguments.parts * int64_t{sizeof(float)},
      [&arguments](int64_t begin, int64_t end) { add_parts_cpu(arguments, begin, end); });
}

/// Uninitialised results; see Backward. `has_sum` and `has_position`: whether the first and the
/// position table's are needed.
Backward backward_results(const Input& in, bool has_sum, bool has_position) {
  const auto options = in.token.options();
  const c10::SymInt dim = in.token.sym_size(1);
  const auto make = [&](bool wanted, const c10::SymDimVector& sizes) {
    return dispatcher::empty_symint(wanted ? sizes : c10::SymDimVector{0}, options);
  };
  const auto table = [&](bool wanted, const MaybeTensor& rows) {
    return make(wanted, wanted ? c10::SymDimVector{rows->sym_size(0), dim} : c10::SymDimVector{});
  };
  return {make(has_sum, output_sizes(in)), make(in.norm_weight().has_value(), {dim}),
          make(in.norm_bias().has_value(), {dim}), table(has_position, in.position()),
          table(has_few_types(in), in.token_type())};
}

/// The number of parts of the tokens; 0: no kernel takes the call.
int64_t parts_of(const BackwardArguments& arguments, const Tensor& gradient) {
  if constexpr (core::built_with_cuda) {
    if (dispatcher::on_cuda(gradient)) {
      const dispatcher::CudaScope scope(gradient);
      return parts_cuda(arguments);
    }
  }
  return std::clamp<int64_t>(arguments.input.batch * arguments.input.seq, 1, parts_cpu);
}

/// Memory for partial sums, if any are needed.
Tensor make_partial(BackwardArguments& arguments, const Tensor& like) {
  if (arguments.weight_gradient == nullptr && arguments.type_gradient == nullptr) return {};
  Tensor partial = at::empty({arguments.parts, sums_of(arguments), partial_columns(like.size(2))},
                             like.options().dtype(compute_type(like)));
  arguments.partial = partial.mutable_data_ptr();
  return partial;
}

/// Sets all rows to zero except those of the sequence's positions, which the kernel writes; returns
/// their address.
void* begin_positions(const Input& in, const Tensor& out) {
  const int64_t first = in.offset().number().expect_int() + in.first_row(),
                end = first + in.ids.size(1);
  out.narrow(0, 0, first).zero_();
  out.narrow(0, end, out.size(0) - end).zero_();
  return target(out.narrow(0, first, in.ids.size(1)));
}

/// Whether the kernel sums the gradients of positions. For sequences too short to divide among
/// threads, this happens afterwards.
bool sums_positions(const Input& in) {
  return counts_positions(in) && !dispatcher::on_cuda(in.ids) && in.ids.numel() > 0 &&
         in.ids.size(1) >= parts_cpu;
}

/// `sum_rows`: see BackwardArguments; if given, the gradient of the sum is not among the results.
Backward run_backward(const Input& in, const Tensor& gradient, const Tensor& mean,
                      const Tensor& rstd, void* const* sum_rows) {
  const Prepared prepared = prepare(in, Pass::backward);
  const Tensor rows = gradient.contiguous(), means = mean.contiguous(), rstds = rstd.contiguous();
  const bool fused = sums_positions(in);
  Backward results = backward_results(in, sum_rows == nullptr && changes(in), fused);
  auto& [sum, weight, bias, position, type] = results;
  BackwardArguments arguments;
  arguments.input = prepared.arguments;
  arguments.gradient = rows.const_data_ptr();
  if (in.norm() == InputNorm::layer) arguments.mean = means.const_data_ptr();
  if (norms(in)) arguments.rstd = rstds.const_data_ptr();
  arguments.sum_gradient = target(sum);
  arguments.sum_rows = sum_rows;
  arguments.weight_gradient = target(weight);
  arguments.bias_gradient = target(bias);
  arguments.type_gradient = target(type);
  if (fused) arguments.position_gradient = begin_positions(in, position);
  arguments.parts = parts_of(arguments, gradient);
  if (arguments.parts == 0) {
    return backward_chain(in, gradient.masked_fill(find_outside(prepared), 0));
  }
  const Tensor partial = make_partial(arguments, rows);
  launch(arguments, gradient);
  if (counts_positions(in) && !fused) {
    position = learned::learned_backward(sum.numel() == 0 ? rows : sum, in.position()->sym_size(0),
                                         {std::nullopt, in.offset(), in.first_row()});
  }
  return results;
}

/// The shapes of the results; see Backward. The kernel decides which of them it needs memory for.
struct BackwardShapes {
  const Input& in;

  /* implicit */ operator Backward() const {
    return backward_results(in, changes(in), counts_positions(in));
  }
};

BackwardShapes backward_shapes(const Tensor& gradient, const Tensor& mean, const Tensor& rstd,
                               const Input& in) {
  check_backward(gradient, mean, rstd, in);
  return {in};
}

Backward backward(const Tensor& gradient, const Tensor& mean, const Tensor& rstd, const Input& in) {
  return run_backward(in, gradient, mean, rstd, nullptr);
}

/// Whether the kernel can write the token table's gradient rows itself: they are unscaled and
/// nothing else needs them.
bool writes_rows(const Input& in) {
  return !dispatcher::on_cuda(in.ids) && changes(in) && in.scale() == 1.0 &&
         (sums_positions(in) || !counts_positions(in));
}

BackwardRows backward_rows(const Tensor& gradient, const Tensor& mean, const Tensor& rstd,
                           const Input& in) {
  check_backward(gradient, mean, rstd, in);
  token::check_table_size(in.ids, in.token.sym_size(0), in.token);
  if (!writes_rows(in)) {
    return with_rows(in, gradient, run_backward(in, gradient, mean, rstd, nullptr));
  }
  const auto rows = token::row_targets(in.token, in.ids.contiguous(), in.padding_idx());
  auto [sum, weight, bias, position, type] =
      run_backward(in, gradient, mean, rstd, rows.targets.data());
  token::sum_repeated(rows);
  return {rows.row_ids, rows.rows, weight, bias, position, type};
}

// ------------------------------------------------------------------------------------- dropout

Tensor empty_dropped(const Tensor& x, const Tensor& seed, double probability, c10::SymInt first) {
  dispatcher::check_floating(x, "x");
  check_dropout(seed, probability, first, "first");
  return dispatcher::empty_symint(x.sym_sizes(), x.options());
}

void fill_dropped(const Tensor& x, const Tensor& seed, double probability, c10::SymInt first,
                  const Tensor& out) {
  const Tensor in = x.contiguous();
  const DropoutArguments arguments{
      in.const_data_ptr(), out.mutable_data_ptr(),         dispatcher::scalar_of(x), in.numel(),
      probability,         seed.const_data_ptr<int64_t>(), first.expect_int()};
  dispatcher::launch(arguments, x, arguments.count, 4 * core::size_of(arguments.scalar), drop_cpu,
                     POSEMBED_CUDA_LAUNCHER(drop_cuda));
}

// ------------------------------------------------------------------------------------ autocast

Tensor autocast(const Input& original) {
  Input in = original;
  for (MaybeTensor* parameter :
       {&in.position(), &in.token_type(), &in.norm_weight(), &in.norm_bias()}) {
    *parameter = dispatcher::follow(*parameter, in.token);
  }
  return input_embedding(in);
}

}  // namespace

BackwardRows with_rows(const Input& in, const Tensor& gradient, const Backward& parts) {
  const auto& [sum, weight, bias, position, type] = parts;
  const auto [row_ids, rows] = token::embedding_backward_rows(
      changes(in) ? sum : gradient, in.token.sym_size(0), {in.ids, in.padding_idx(), in.scale()});
  return {row_ids, rows, weight, bias, position, type};
}

Tensor encoding(const Input& in) {
  const c10::SymInt& first = in.offset().number();
  const Tensor positions =
      in.positions().has_value()
          ? *in.positions()
          : at::arange(first, first + in.ids.sym_size(1), in.ids.options().dtype(at::kLong));
  return sinusoidal::sinusoidal_encode({positions, in.sinusoid()}, compute_type(in.token));
}

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  const std::string input =
      "Tensor token, "
      "Tensor ids, "
      "Tensor? position=None, "
      "Tensor? positions=None, "
      "Tensor? token_type=None, "
      "Tensor? types=None, "
      "Tensor? norm_weight=None, "
      "Tensor? norm_bias=None, "
      "Tensor? seed=None, "
      "SymInt offset=0, "
      "int first_row=0, "
      "str sinusoid=\"\", "
      "str norm=\"none\", "
      "float eps=1e-5, "
      "float scale=1.0, "
      "float dropout=0.0, "
      "int padding_idx=-1, "
      "int position_padding_idx=-1, "
      "str gradient=\"dense\", "
      "SymInt first_token=0, "
      "bool own_rows=False";
  define(m, "input_embedding(" + input + ") -> Tensor");
  define(m, "input_embedding_forward(" + input + ") -> (Tensor, Tensor, Tensor)");
  const std::string backward_call = "Tensor output_gradient, Tensor mean, Tensor rstd, " + input;
  define(m, "input_embedding_backward(" + backward_call +
                ") -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  define(m, "input_embedding_backward_rows(" + backward_call +
                ") -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  define(m, "input_dropout(Tensor x, Tensor seed, float probability, SymInt first=0) -> Tensor");
  input_embedding.implement<empty_output, fill_output>(m);
  input_embedding.autocast<autocast>(m);
  input_embedding_forward.implement<empty_forward, forward>(m);
  input_embedding_backward.implement<backward_shapes, backward>(m);
  input_embedding_backward_rows.implement_sized_by_values<backward_rows>(m);
  input_dropout.implement<empty_dropped, fill_dropped>(m);
}

}  // namespace posembed::input
