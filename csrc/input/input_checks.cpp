// Checks the arguments of the input operators, for eager and Meta kernels, then converts them to
// the form that kernels read.
#include "core/index_range.h"
#include "dispatcher/checks.h"
#include "dispatcher/cuda_scope.h"
#include "dispatcher/tensors.h"
#include "input/input_operator.h"
#include "learned/learned_operator.h"

namespace posembed::input {
namespace {

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
  if (in.norm_weight().has_value()) {
    dispatcher::check_rank(*in.norm_weight(), "norm_weight", 1, "[embedding_dim]");
    check_like_token(*in.norm_weight(), "norm_weight", in.token);
  }
  if (in.norm_bias().has_value()) {
    dispatcher::check_rank(*in.norm_bias(), "norm_bias", 1, "[embedding_dim]");
    check_like_token(*in.norm_bias(), "norm_bias", in.token);
  }
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
void prepare_position_index(const Input& in, Prepared& prepared) {
  Table& position = prepared.arguments.position;
  position.offset = in.offset().number().expect_int();
  if (!in.positions().has_value()) return;
  prepared.positions = in.positions()->contiguous();
  position.index = dispatcher::index_view(prepared.positions);
  const bool shared = prepared.positions.dim() == 1 || prepared.positions.size(0) == 1;
  position.index_stride[0] = shared ? 0 : in.ids.size(1);
  position.index_stride[1] = 1;
}

/// Whether the kernel computes the sinusoid.
bool computes_sinusoid(const Input& in, Pass pass, const Arguments& arguments) {
  if (!dispatcher::on_cuda(in.token)) return true;
  if constexpr (core::built_with_cuda) {
    return pass == Pass::forward && computes_sinusoid_cuda(arguments);
  }
  return false;
}

void prepare_sinusoid(const Input& in, Pass pass, Prepared& prepared) {
  if (in.sinusoid().empty()) return;
  Arguments& arguments = prepared.arguments;
  prepared.sinusoid = sinusoidal::specification(in.sinusoid());
  arguments.sinusoid = prepared.sinusoid->sinusoid();
  if (computes_sinusoid(in, pass, arguments)) return;
  arguments.sinusoid = {};
  prepared.encoding = encoding(in).contiguous();
  arguments.encoding = prepared.encoding.const_data_ptr();
  const bool shared = prepared.encoding.dim() == 2 || prepared.encoding.size(0) == 1;
  arguments.encoding_stride[0] = shared ? 0 : in.ids.size(1) * in.token.size(1);
  arguments.encoding_stride[1] = in.token.size(1);
}

void prepare_position(const Input& in, Prepared& prepared) {
  if (!in.position().has_value()) return;
  prepared.position = dispatcher::with_contiguous_last_dim(*in.position());
  const int64_t rows = in.position()->size(0);
  if (in.positions().has_value() && dispatcher::on_cuda(in.token)) {
    check_range(prepared.positions, "positions", *in.position(), "position");
  } else if (in.positions().has_value()) {
    learned::check_position_values(prepared.positions, rows, in.first_row());
  }
  Table& position = prepared.arguments.position;
  position.data = prepared.position.const_data_ptr();
  position.rows = rows;
  position.stride = prepared.position.stride(0);
  position.first_row = in.first_row();
  position.kind = core::ErrorKind::position;
}

void prepare_norm(const Input& in, Prepared& prepared) {
  Arguments& arguments = prepared.arguments;
  arguments.norm = in.norm() == InputNorm::layer ? Norm::layer
                   : in.norm() == InputNorm::rms ? Norm::rms
                                                 : Norm::none;
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

}  // namespace

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

void check(const Input& in) {
  check_token(in);
  check_position(in);
  check_type(in);
  check_norm(in);
  check_dropout(in.seed(), in.dropout(), in.first_token(), "first_token");
}

Prepared prepare(const Input& in, Pass pass) {
  Prepared prepared;
  Arguments& arguments = prepared.arguments;
  arguments.scalar = dispatcher::scalar_of(in.token);
  arguments.batch = in.ids.size(0);
  arguments.seq = in.ids.size(1);
  arguments.embedding_dim = in.token.size(1);
  arguments.scale = in.scale();
  prepare_token(in, prepared);
  prepare_type(in, prepared);
  prepare_position_index(in, prepared);
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

}  // namespace posembed::input
