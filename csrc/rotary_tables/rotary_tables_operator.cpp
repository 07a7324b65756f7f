// Rotation of query, or query and key, by given cosines and sines: functional, in place, and into
// given memory. Runs the rotary kernel; eager and Meta kernels share their checks.
#include "rotary_tables/rotary_tables_operator.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <utility>

#include "dispatcher/autograd.h"
#include "dispatcher/checks.h"
#include "dispatcher/launch.h"
#include "rotary/rotary_operator.h"

namespace posembed::rotary_tables {
namespace {

using rotary::Dimensions;

// ----------------------------------------------------------------------------------------- checks

void check_options(const RotaryTables& tables) {
  const Numerics numerics = tables.numerics();
  TORCH_CHECK_VALUE(numerics == Numerics::float32 || numerics == Numerics::float32_product,
                    "numerics: expected 'float32' or 'float32_product' for given tables, got '",
                    name(numerics), "'");
  TORCH_CHECK_VALUE(tables.start() >= 0, "start: expected 0 or more, got ", tables.start());
  TORCH_CHECK_VALUE(tables.cos().is_complex() != tables.sin().has_value(),
                    "sin: expected a tensor beside a real cos, and none beside a complex one");
}

void check_rows(const Tensor& tensor, const char* argument, const Dimensions& where) {
  dispatcher::check_floating(tensor, argument);
  dispatcher::check_rank(tensor, argument, where.rank, where.shape);
}

/// Checks that tables have the heads of a tensor, or one head for all.
void check_heads(const RotaryTables& tables, const Tensor& tensor, const char* argument,
                 const Dimensions& where) {
  if (!has_heads(tables)) return;
  const c10::SymInt heads = tables.cos().sym_size(2);
  TORCH_CHECK_VALUE(heads == 1 || heads == tensor.sym_size(where.heads), argument,
                    ": expected the heads of cos, ", heads, ", got ", tensor.sym_size(where.heads));
}

void check_window(const Tensor& tensor, const char* argument, const RotaryTables& tables) {
  const c10::SymInt rotated = 2 * pairs_of(tables);
  TORCH_CHECK_VALUE(tables.start() <= tensor.sym_size(-1) - rotated, argument,
                    ": expected head_dim of at least start + rotary_dim = ", tables.start(), " + ",
                    rotated, ", got ", tensor.sym_size(-1));
}

/// The checks that need no values.
void check(const Tensor& query, const Tensor* key, const RotaryTables& tables) {
  const Dimensions where = rotary::dimensions(tables.layout());
  check_rows(query, "query", where);
  check_tables(tables, query, where);
  check_window(query, "query", tables);
  check_heads(tables, query, "query", where);
  if (key != nullptr) check_heads(tables, *key, "key", where);
  if (key == nullptr) return;
  check_rows(*key, "key", where);
  rotary::check_key(*key, "key", query, where);
  dispatcher::check_size(key->sym_size(-1), query.sym_size(-1), "key", "head_dim");
}

/// Checks memory for the rotated `in`.
void check_written(const Tensor& out, const char* argument, const Tensor& in,
                   const char* in_argument, const RotaryTables& tables) {
  const at::ScalarType type = result_type(in.scalar_type(), tables);
  TORCH_CHECK_TYPE(out.scalar_type() == type, argument, ": expected ", dispatcher::dtype_name(type),
                   ", the dtype to which ", in_argument, " and the tables promote, got ",
                   dispatcher::dtype_name(out.scalar_type()));
  dispatcher::check_same_shape(out, argument, in, in_argument);
  dispatcher::check_writable(out, argument);
}

// ---------------------------------------------------------------------------------------- launches

rotary::ProductRounding product_rounding_for(const RotaryTables& tables, const Tensor& query) {
  if (tables.numerics() == Numerics::float32_product) return rotary::ProductRounding::none;
  if (!tables.cos().is_complex()) return rotary::ProductRounding::to_data_type;
  return dispatcher::on_cuda(query) ? rotary::ProductRounding::fused
                                    : rotary::ProductRounding::none;
}

void rotate(const rotary::Job& job, const TableRotation& rotation) {
  const RotaryTables& tables = rotation.tables;
  const Dimensions where = rotary::dimensions(tables.layout());
  const Tensor& query = *job.in[0];
  const RotaryTables real = readable(tables);
  rotary::Arguments call = rotary::arguments(job, where);
  call.head_dim = query.size(-1);
  call.pairs = pairs_of(tables).expect_int();
  call.start = tables.start();
  call.interleaved = tables.interleaved();
  call.reverse = rotation.transpose;
  call.product_rounding = product_rounding_for(tables, query);
  set_tables(real, &call);
  rotary::launch_rotation(call, query);
}

struct Rules {
  using Call = TableRotation;

  static std::tuple<> check(const Tensor& query, const Tensor* key, const TableRotation& call) {
    rotary_tables::check(query, key, call.tables);
    return {};
  }

  static void check_written(const Tensor& out, const char* name, const Tensor& in,
                            const char* in_name, const TableRotation& call) {
    rotary_tables::check_written(out, name, in, in_name, call.tables);
  }

  static Tensor empty(const Tensor& in, const TableRotation& call) {
    return rotary::empty_result(in, result_type(in.scalar_type(), call.tables));
  }

  /// In the result's dtype, with a contiguous last dimension.
  static Tensor readable(const Tensor& in, const TableRotation& call) {
    return dispatcher::with_contiguous_last_dim(in.to(result_type(in.scalar_type(), call.tables)));
  }

  static void rotate(const rotary::Job& job, const TableRotation& call, const std::tuple<>&) {
    rotary_tables::rotate(job, call);
  }
};

}  // namespace

at::ScalarType result_type(at::ScalarType type, const RotaryTables& tables) {
  const bool keeps = tables.numerics() == Numerics::float32_product || tables.cos().is_complex();
  return keeps ? type : at::promote_types(type, tables.cos().scalar_type());
}

c10::SymInt pairs_of(const RotaryTables& tables) {
  const c10::SymInt width = tables.cos().sym_size(-1);
  return tables.half_width() || tables.cos().is_complex() ? width : width / 2;
}

bool has_heads(const RotaryTables& tables) { return tables.cos().dim() == 4; }

void check_tables(const RotaryTables& tables, const Tensor& query, const Dimensions& where) {
  check_options(tables);
  // cos, sin: [batch or 1, seq, width], [seq, width] or [batch or 1, seq, heads or 1, width]
  const Tensor& cos = tables.cos();
  if (tables.sin().has_value()) {
    dispatcher::check_floating(cos, "cos");
    dispatcher::check_like(*tables.sin(), "sin", cos, "cos");
  } else {
    TORCH_CHECK_TYPE(cos.scalar_type() != at::kComplexHalf,
                     "cos: expected complex64 or complex128, got ",
                     dispatcher::dtype_name(cos.scalar_type()));
  }
  TORCH_CHECK_VALUE(cos.dim() >= 2 && cos.dim() <= 4,
                    "cos: expected [batch or 1, seq, width] or [seq, width], or ",
                    "[batch or 1, seq, heads, width], got ", cos.sym_sizes());
  const c10::SymInt seq = has_heads(tables) ? cos.sym_size(1) : cos.sym_size(-2);
  dispatcher::check_size(seq, query.sym_size(where.seq), "cos", "seq");
  if (cos.dim() > 2) {
    const c10::SymInt batch = where.batch < 0 ? 1 : query.sym_size(where.batch);
    dispatcher::check_batch(cos.sym_size(0), batch, "cos");
  }
  const bool halves = tables.half_width() || cos.is_complex();
  TORCH_CHECK_VALUE(halves || cos.sym_size(-1) % 2 == 0, "cos: expected an even width, got ",
                    cos.sym_size(-1));
  const c10::SymInt pairs = pairs_of(tables);
  TORCH_CHECK_VALUE(pairs <= rotary::max_pairs, "cos: expected at most ", rotary::max_pairs,
                    " pairs, got ", pairs);
}

RotaryTables readable(const RotaryTables& tables) {
  RotaryTables result = tables;
  if (tables.cos().is_complex()) {
    const Tensor parts = at::view_as_real(tables.cos().resolve_conj());
    return result.cos(parts.select(-1, 0)).sin(parts.select(-1, 1)).half_width(true);
  }
  result.cos(tables.cos().resolve_neg()).sin(tables.sin()->resolve_neg());
  if (result.cos().strides() != result.sin()->strides()) {
    result.cos(result.cos().contiguous()).sin(result.sin()->contiguous());
  }
  return result;
}

void set_tables(const RotaryTables& tables, rotary::Arguments* call) {
  const Tensor& cos = tables.cos();
  call->cosines = cos.const_data_ptr();
  call->sines = tables.sin()->const_data_ptr();
  call->table_scalar = dispatcher::scalar_of(cos);
  const bool by_batch = cos.dim() > 2 && cos.size(0) > 1;
  const int64_t step = cos.stride(-1);
  call->table_stride[0] = by_batch ? cos.stride(0) : 0;
  call->table_stride[1] = has_heads(tables) ? cos.stride(1) : cos.stride(-2);
  if (has_heads(tables) && cos.size(2) > 1) call->table_head_stride = cos.stride(2);
  call->table_stride[2] = step;
  if (tables.half_width()) return;
  if (tables.interleaved()) call->table_stride[2] = 2 * step;
  call->table_second = tables.interleaved() ? step : call->pairs * step;
}

namespace {

// ---------------------------------------------------------------------------------------- gradient
// Derivatives of rotations by given tables. They are linear in the rotated tensor, whose gradient
// is rotated by the transpose, and in the tables, whose gradient is composed of torch's operators.
// Rotated tensors are saved only if tables need a gradient.

using dispatcher::Gradients;
using dispatcher::variable_list;
using MaybeTensor = std::optional<Tensor>;

TableRotation transposed(TableRotation rotation) {
  rotation.transpose = !rotation.transpose;
  return rotation;
}

// ------------------------------------------------------------------------------ gradient of tables

/// The two components of each pair, as [batch, seq, heads, pairs].
struct Pairs {
  Tensor first, second;
};

Pairs pairs_in(const Tensor& tensor, const RotaryTables& tables, at::ScalarType type) {
  const rotary::Dimensions where = rotary::dimensions(tables.layout());
  Tensor rows = tensor.to(type);
  if (where.batch < 0) {
    rows = rows.unsqueeze(0);
  } else {
    rows = rows.permute({where.batch, where.seq, where.heads, 3});
  }
  const c10::SymInt pairs = pairs_of(tables), start = tables.start();
  const auto part = [&](const c10::SymInt& begin, const c10::SymInt& end, int64_t step) {
    return rows.slice_symint(-1, start + begin, start + end, step);
  };
  if (tables.interleaved()) return {part(0, 2 * pairs, 2), part(1, 2 * pairs, 2)};
  return {part(0, pairs, 1), part(pairs, 2 * pairs, 1)};
}

/// Sums a gradient [batch, seq, heads, pairs] over what shares the rows of the tables.
Tensor over_rows(const RotaryTables& tables, const Tensor& gradient) {
  const Tensor& table = tables.cos();
  Tensor sum = gradient;
  if (!has_heads(tables)) {
    sum = sum.sum(2);
  } else if (table.sym_size(2) == 1) {
    sum = sum.sum(2, /*keepdim=*/true);
  }
  if (table.dim() == 2) return sum.sum(0);
  return table.sym_size(0) == 1 ? sum.sum(0, /*keepdim=*/true) : sum;
}

/// The gradient of a table from the terms of both components of each pair, [batch, seq, heads,
/// pairs]: their sum if the components share a value.
Tensor gradient_of_table(const RotaryTables& tables, const Tensor& first, const Tensor& second) {
  if (tables.half_width() || tables.cos().is_complex()) return over_rows(tables, first + second);
  const Tensor parts[] = {over_rows(tables, first), over_rows(tables, second)};
  if (!tables.interleaved()) return at::cat(parts, -1);
  return at::stack(parts, -1).reshape_symint(tables.cos().sym_sizes());
}

/// Gradients of cosines and sines.
struct TableGradients {
  Tensor cosine, sine;
};

TableGradients table_gradients(const Tensor& gradient, const Tensor& input,
                               const TableRotation& rotation) {
  const RotaryTables& tables = rotation.tables;
  const at::ScalarType type =
      at::promote_types(at::kFloat, at::promote_types(gradient.scalar_type(), input.scalar_type()));
  const Pairs g = pairs_in(gradient, tables, type), x = pairs_in(input, tables, type);
  const Tensor cosine = gradient_of_table(tables, g.first * x.first, g.second * x.second);
  const Tensor along = g.first * x.second, against = g.second * x.first;
  return {cosine, rotation.transpose ? gradient_of_table(tables, -against, along)
                                     : gradient_of_table(tables, -along, against)};
}

/// The same in the tables' dtype; complex tables have one gradient.
std::pair<Tensor, Tensor> gradients_of_tables(const TableGradients& sums, const Tensor& cos) {
  if (cos.is_complex()) {
    return {at::complex(sums.cosine, sums.sine).to(cos.scalar_type()), Tensor()};
  }
  return {sums.cosine.to(cos.scalar_type()), sums.sine.to(cos.scalar_type())};
}

// -------------------------------------------------------------------------------------------- node

/// Gradients of the rotated tensors of rotary_tables and rotary_tables_pair, then those of cos and
/// sin, for which alone `query` and `key` are saved.
variable_list rotated_gradient(const Gradients& gradients, const TableRotation& rotation,
                               const Tensor& query, const Tensor& key) {
  const size_t count = gradients.size();
  variable_list result(count + 2);
  if (gradients.needs(count) || gradients.needs(count + 1)) {
    TableGradients sums;
    for (size_t i = 0; i < count; ++i) {
      if (!gradients[i].defined()) continue;
      const TableGradients own = table_gradients(gradients[i], i == 0 ? query : key, rotation);
      sums = {dispatcher::accumulate(sums.cosine, own.cosine),
              dispatcher::accumulate(sums.sine, own.sine)};
    }
    std::tie(result[count], result[count + 1]) = gradients_of_tables(sums, rotation.tables.cos());
  }
  const TableRotation back = transposed(rotation);
  if (count == 2 && gradients[0].defined() && gradients[1].defined()) {
    std::tie(result[0], result[1]) = rotary_tables_pair(gradients[0], gradients[1], back);
    return result;
  }
  for (size_t i = 0; i < count; ++i) {
    if (gradients[i].defined()) result[i] = rotary_tables(gradients[i], back);
  }
  return result;
}

auto backward_node(const TableRotation& rotation, const Tensor& query, const Tensor& key = {}) {
  using Node = dispatcher::FunctionNode<rotary_tables, rotated_gradient>;
  const Tensor& cos = rotation.tables.cos();
  const MaybeTensor& sin = rotation.tables.sin();
  auto node = key.defined() ? dispatcher::node_for<Node>(query, key, cos, sin)
                            : dispatcher::node_for<Node>(query, cos, sin);
  if (node) {
    const bool keeps = torch::autograd::compute_requires_grad(cos, sin);
    node->save(rotation, keeps ? query : Tensor(), keeps ? key : Tensor());
  }
  return node;
}

// ---------------------------------------------------------------------------------------- tangents

RotaryTables primal(RotaryTables tables) {
  tables.cos(dispatcher::primal(tables.cos()));
  if (tables.sin().has_value()) tables.sin(dispatcher::primal(*tables.sin()));
  return tables;
}

Tensor tangent_or_zeros(const Tensor& table) {
  const Tensor direction = dispatcher::tangent(table);
  return direction.defined() ? direction : at::zeros_like(dispatcher::primal(table));
}

/// The tables' tangents as tables; std::nullopt if they have none.
std::optional<RotaryTables> tangent_of(RotaryTables tables) {
  const bool any = dispatcher::tangent(tables.cos()).defined() ||
                   (tables.sin().has_value() && dispatcher::tangent(*tables.sin()).defined());
  if (!any) return std::nullopt;
  tables.cos(tangent_or_zeros(tables.cos()));
  if (tables.sin().has_value()) tables.sin(tangent_or_zeros(*tables.sin()));
  return tables;
}

/// `input` with zeros where nothing is rotated.
Tensor window_of(const Tensor& input, const RotaryTables& tables) {
  const c10::SymInt rotated = 2 * pairs_of(tables), start = tables.start();
  const Tensor window = input.slice_symint(-1, start, start + rotated);
  return at::constant_pad_nd_symint(window, {start, input.sym_size(-1) - start - rotated});
}

/// Undefined if neither the rotated tensor nor the tables have a tangent.
Tensor rotated_tangent(const Tensor& in, const TableRotation& rotation) {
  Tensor result;
  if (const Tensor direction = dispatcher::tangent(in); direction.defined()) {
    result = rotary_tables(direction, {primal(rotation.tables), rotation.transpose});
  }
  if (const auto direction = tangent_of(rotation.tables); direction.has_value()) {
    const Tensor window = window_of(dispatcher::primal(in), rotation.tables);
    result =
        dispatcher::accumulate(result, rotary_tables(window, {*direction, rotation.transpose}));
  }
  return result;
}

// ----------------------------------------------------------------------------------------- kernels

Tensor one_autograd(const Tensor& query, const TableRotation& rotation) {
  auto node = backward_node(rotation, query);
  Tensor output = dispatcher::below_autograd([&] { return rotary_tables(query, rotation); });
  if (node) torch::autograd::set_history(output, node);
  dispatcher::set_tangent(output, rotated_tangent(query, rotation));
  return output;
}

std::tuple<Tensor, Tensor> pair_autograd(const Tensor& query, const Tensor& key,
                                         const TableRotation& rotation) {
  auto node = backward_node(rotation, query, key);
  std::tuple<Tensor, Tensor> outputs =
      dispatcher::below_autograd([&] { return rotary_tables_pair(query, key, rotation); });
  auto& [query_out, key_out] = outputs;
  if (node) torch::autograd::set_history(query_out, node);
  if (node) torch::autograd::set_history(key_out, node);
  dispatcher::set_tangent(query_out, rotated_tangent(query, rotation));
  dispatcher::set_tangent(key_out, rotated_tangent(key, rotation));
  return outputs;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  const std::string tables =
      "Tensor cos, "
      "Tensor? sin=None, "
      "str layout=\"bhsd\", "
      "bool interleaved=False, "
      "bool half_width=False, "
      "int start=0, "
      "str numerics=\"float32\", "
      "bool transpose=False";
  define(m, "rotary_tables(Tensor query, " + tables + ") -> Tensor");
  define(m, "rotary_tables_pair(Tensor query, Tensor key, " + tables + ") -> (Tensor, Tensor)");
  define(m, "rotary_tables_(Tensor(a!) query, " + tables + ") -> ()");
  define(m, "rotary_tables_pair_(Tensor(a!) query, Tensor(b!) key, " + tables + ") -> ()");
  define(m, "rotary_tables_out(Tensor(a!) out, Tensor query, " + tables + ") -> ()");
  define(m,
         "rotary_tables_pair_out("
         "Tensor(a!) query_out, "
         "Tensor(b!) key_out, "
         "Tensor query, "
         "Tensor key, " +
             tables + ") -> ()");
  rotary::Forms<Rules>::implement<rotary_tables, rotary_tables_pair, rotary_tables_,
                                  rotary_tables_pair_, rotary_tables_out, rotary_tables_pair_out>(
      m);
  rotary_tables.differentiate<one_autograd>(m);
  rotary_tables_pair.differentiate<pair_autograd>(m);
}

}  // namespace posembed::rotary_tables
