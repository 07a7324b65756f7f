// The learned-position operators: rows of a table added to x, looked up alone, and the table's
// gradient. Consecutive positions need neither ids nor a sort, because their gradient is a sum over
// the batch.
#include "learned/learned_operator.h"

#include <cmath>

#include "bag/bag_operator.h"
#include "core/index.h"
#include "dispatcher/autograd.h"
#include "dispatcher/launch.h"
#include "dispatcher/output_memory.h"
#include "learned/learned.h"
#include "positions/positions_operator.h"
#include "token/token_operator.h"

namespace posembed::learned {
namespace {

// ------------------------------------------------------------------------------------- checks

void check_add(const Tensor& x, const Tensor& weight, const Rows& rows) {
  // x: [batch, seq, embedding_dim]
  dispatcher::check_floating(x, "x");
  dispatcher::check_rank(x, "x", 3, "[batch, seq, embedding_dim]");
  check_table(weight, "weight", rows.first_row);
  dispatcher::check_same_dtype(x, "x", weight, "weight");
  dispatcher::check_size(x.sym_size(2), weight.sym_size(1), "x", "embedding_dim");
  check_positions(rows.positions, x.sym_size(0), x.sym_size(1), rows.offset.number());
  if (rows.positions.has_value()) return;
  check_length(rows.offset.number(), x.sym_size(1), weight.sym_size(0), rows.first_row);
}

void check_encode(const Tensor& weight, const Tensor& positions, int64_t first_row) {
  check_table(weight, "weight", first_row);
  dispatcher::check_position_integers(positions, "positions");
}

void check_backward(const Tensor& gradient, const c10::SymInt& count, const Rows& rows) {
  // gradient: [batch, seq, embedding_dim]
  dispatcher::check_floating(gradient, "gradient");
  dispatcher::check_rank(gradient, "gradient", 3, "[batch, seq, embedding_dim]");
  check_positions(rows.positions, gradient.sym_size(0), gradient.sym_size(1), rows.offset.number());
  TORCH_CHECK_VALUE(rows.first_row >= 0 && rows.first_row <= count, "first_row: expected 0 to ",
                    count, ", the rows of the table, got ", rows.first_row);
  dispatcher::check_result({count, gradient.sym_size(2)}, gradient.scalar_type(), "num_rows");
  if (rows.positions.has_value()) return;
  check_length(rows.offset.number(), gradient.sym_size(1), count, rows.first_row);
}

// ---------------------------------------------------------------------------------------- add

AddArguments add_arguments(const Tensor& x, const Tensor& weight, const Tensor& out) {
  AddArguments arguments;
  arguments.x = x.const_data_ptr();
  arguments.weight = weight.const_data_ptr();
  arguments.out = out.mutable_data_ptr();
  arguments.scalar = dispatcher::scalar_of(x);
  arguments.batch = x.size(0);
  arguments.seq = x.size(1);
  arguments.embedding_dim = x.size(2);
  arguments.x_stride[0] = x.stride(0);
  arguments.x_stride[1] = x.stride(1);
  arguments.rows = weight.size(0);
  arguments.weight_stride = weight.stride(0);
  arguments.error = dispatcher::device_error(x.device());
  return arguments;
}

Tensor empty_sum(const Tensor& x, const Tensor& weight, const Rows& rows) {
  check_add(x, weight, rows);
  return dispatcher::empty_symint(x.sym_sizes(), x.options());
}

void add(const Tensor& x, const Tensor& weight, const Rows& rows, const Tensor& out) {
  const bool has_positions = rows.positions.has_value();
  const int64_t offset = rows.offset.number().expect_int();
  const Tensor in = dispatcher::with_contiguous_last_dim(x),
               table = dispatcher::with_contiguous_last_dim(weight);
  AddArguments arguments = add_arguments(in, table, out);
  arguments.offset = offset;
  arguments.first_row = rows.first_row;
  const Tensor positions = has_positions ? rows.positions->contiguous() : Tensor();
  if (has_positions) {
    if (!dispatcher::on_cuda(x)) check_position_values(positions, weight.size(0), rows.first_row);
    arguments.positions = dispatcher::index_view(positions);
    arguments.position_stride[0] = positions.dim() == 2 && positions.size(0) > 1 ? x.size(1) : 0;
    arguments.position_stride[1] = 1;
  }
  dispatcher::launch(arguments, x, arguments.batch * arguments.seq,
                     2 * arguments.embedding_dim * core::size_of(arguments.scalar), add_cpu,
                     POSEMBED_CUDA_LAUNCHER(add_cuda));
}

// ------------------------------------------------------------------------------------- encode

Tensor empty_rows(const Tensor& weight, const Tensor& positions, int64_t first_row) {
  check_encode(weight, positions, first_row);
  return dispatcher::empty_symint(dispatcher::sizes_and(positions, weight.sym_size(1)),
                                  weight.options());
}

void encode(const Tensor& weight, const Tensor& positions, int64_t first_row, const Tensor& out) {
  const Tensor dense = positions.contiguous();
  if (!dispatcher::on_cuda(weight)) check_position_values(dense, weight.size(0), first_row);
  token::gather(weight, dense, {first_row, 1.0, core::ErrorKind::position}, out);
}

// ----------------------------------------------------------------------- the table's gradient

/// Writes the gradient of consecutive rows into those rows of `out`.
void sum_batch(const Tensor& gradient, const Tensor& out) {
  SumArguments arguments;
  arguments.gradient = gradient.const_data_ptr();
  arguments.out = out.mutable_data_ptr();
  arguments.scalar = dispatcher::scalar_of(gradient);
  arguments.batch = gradient.size(0);
  arguments.seq = gradient.size(1);
  arguments.embedding_dim = gradient.size(2);
  dispatcher::launch(arguments, gradient, arguments.seq,
                     arguments.batch * arguments.embedding_dim * core::size_of(arguments.scalar),
                     sum_batch_cpu, POSEMBED_CUDA_LAUNCHER(sum_batch_cuda));
}

dispatcher::Unallocated table_shape(const Tensor& gradient, c10::SymInt count, const Rows& rows) {
  check_backward(gradient, count, rows);
  return {{count, gradient.sym_size(2)}, gradient.options()};
}

Tensor backward(const Tensor& gradient, c10::SymInt count, const Rows& rows) {
  if (rows.positions.has_value()) {
    const Tensor ids =
        at::add(rows.positions->expand({gradient.size(0), gradient.size(1)}), rows.first_row);
    return token::embedding_backward(gradient, count, {ids});
  }
  const int64_t offset = rows.offset.number().expect_int(), all = count.expect_int();
  const Tensor out = at::zeros({all, gradient.size(2)}, gradient.options());
  sum_batch(gradient.contiguous(), out.narrow(0, offset + rows.first_row, gradient.size(1)));
  return out;
}

/// Keeps the dtype of x, which an earlier layer may have lowered, and casts the table.
Tensor add_autocast(const Tensor& x, const Tensor& weight, const Rows& rows) {
  return learned_add(x, dispatcher::follow(weight, x), rows);
}

}  // namespace

void check_table(const Tensor& weight, const char* argument, int64_t first_row) {
  dispatcher::check_floating(weight, argument);
  dispatcher::check_rank(weight, argument, 2, "[first_row + max_positions, embedding_dim]");
  TORCH_CHECK_VALUE(first_row >= 0 && first_row <= weight.sym_size(0), "first_row: expected 0 to ",
                    weight.sym_size(0), ", the rows of ", argument, ", got ", first_row);
}

void check_positions(const MaybeTensor& positions, const c10::SymInt& batch, const c10::SymInt& seq,
                     const c10::SymInt& offset) {
  dispatcher::check_at_least(offset, 0, "offset");
  if (!positions.has_value()) return;
  dispatcher::check_position_integers(*positions, "positions");
  dispatcher::check_positions_shape(*positions, "positions", batch, seq, offset);
}

void check_length(const c10::SymInt& offset, const c10::SymInt& seq, const c10::SymInt& rows,
                  int64_t first_row) {
  const auto first = offset.maybe_as_int(), count = seq.maybe_as_int(), all = rows.maybe_as_int();
  if (!first || !count || !all) return;  // the check would bound a graph's lengths
  const int64_t length = *all - first_row;
  // Avoids offset + seq, which may overflow.
  TORCH_CHECK_INDEX(*count <= length && *first <= length - *count, "positions: expected 0 to ",
                    length - 1, ", a row of the position table of ", length, ", got ",
                    static_cast<uint64_t>(*first) + static_cast<uint64_t>(*count) - 1,
                    ", the last of the sequence");
}

void check_position_values(const Tensor& positions, int64_t rows, int64_t first_row) {
  const core::IndexView view = dispatcher::index_view(positions);
  const int64_t index = core::find_outside(view, positions.numel(), -first_row, rows - first_row);
  TORCH_CHECK_INDEX(index < 0, "positions: expected ", -first_row, " to ", rows - first_row - 1,
                    ", a row of the position table of ", rows - first_row, ", got ",
                    core::read(view, index), " at index ", index);
}

namespace {

// ------------------------------------------------------------------------------------------ packed
// The rows of pictures of any sizes, packed one after another: each token is the weighted sum of
// the table's cells around it, as torch.nn.functional.interpolate weighs them. A bag of cells for
// each token, so nothing loops over pictures.

using MaybeSize = std::optional<c10::SymInt>;

/// The cells around tokens along one axis: [tokens, 2], or [tokens, 4] for cubic interpolation.
struct Taps {
  Tensor cells;    // int64
  Tensor weights;  // float64
};

/// Keys' cubic convolution with the parameter that torch has, -0.75, at distances 1 + t, t, 1 - t
/// and 2 - t. Keys, "Cubic Convolution Interpolation for Digital Image Processing", 1981.
Tensor cubic_weights(const Tensor& t) {
  constexpr double a = -0.75;
  const auto near = [](const Tensor& d) { return ((a + 2) * d - (a + 3)) * d * d + 1; };
  const auto far = [](const Tensor& d) { return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a; };
  return at::stack({far(1 + t), near(t), near(1 - t), far(2 - t)}, -1);
}

/// index, size: [tokens], of a picture; cells: of the table.
Taps taps_of(const Tensor& index, const Tensor& size, const c10::SymInt& cells,
             const Resampling& how) {
  const at::Scalar side(cells), last(cells - 1);
  const Tensor from = index.to(at::kDouble), to = size.to(at::kDouble);
  Tensor place = how.align_corners() ? from * last / (to - 1).clamp_min(1)
                                     : (from + 0.5) * side / (to + how.scale_offset()) - 0.5;
  const bool linear = how.method() == "bilinear";
  if (linear) place = place.clamp_min(0);
  const Tensor before = place.floor(), t = place - before, cell = before.to(at::kLong);
  const auto at_distance = [&](const auto& d) { return (cell + d).clamp(at::Scalar(0), last); };
  if (linear) {
    // As in torch, an axis that keeps its size has no second cell, which might be infinite.
    const Tensor next = size.ne(side).to(at::kLong);
    return {at::stack({at_distance(0), at_distance(next)}, -1), at::stack({1 - t, t}, -1)};
  }
  return {at::stack({at_distance(-1), at_distance(0), at_distance(1), at_distance(2)}, -1),
          cubic_weights(t)};
}

Tensor compute_packed(const Tensor& weight, c10::SymIntArrayRef grid, const Tensor& grids,
                      int64_t merge, MaybeSize num_tokens, const Resample& call) {
  const c10::SymInt first = prefix_of(weight, grid);
  check_resampling(call.how);
  TORCH_CHECK_VALUE(!call.how.antialias(),
                    "antialias: expected False for packed pictures; join the tables of "
                    "resampled(grid) instead");
  const positions::Places places = positions::places_of(grids, merge, num_tokens);
  const Taps rows = taps_of(places.row, places.height, grid[0], call.how);
  const Taps columns = taps_of(places.column, places.width, grid[1], call.how);
  Tensor cells = rows.cells.unsqueeze(2) * at::Scalar(grid[1]) + columns.cells.unsqueeze(1) +
                 at::Scalar(first);  // [tokens, taps, taps]
  if (places.fit.defined()) cells = cells.masked_fill(places.fit.logical_not(), -1);
  const at::ScalarType type = dispatcher::compute_type(weight);
  const Tensor weights = (rows.weights.unsqueeze(2) * columns.weights.unsqueeze(1)).to(type);
  return bag::token_bag(weight.to(type), {cells.flatten(1), std::nullopt}, "sum",
                        weights.flatten(1), "dense")
      .to(weight.scalar_type());
}

// --------------------------------------------------------------------------------------- extension
// Lengthens tables of positions and resamples grids of them with torch's interpolation, except the
// rows before position 0 or before the grid, and computes the positions of tokens in padded
// sequences.

/// Row p of the result is row p mod length.
Tensor repeat(const Tensor& rows, int64_t count) {
  const Tensor indices = at::arange(count, at::TensorOptions(rows.device()).dtype(at::kLong));
  return rows.index_select(0, at::remainder(indices, rows.size(0)));
}

/// The first and the last row do not change; the others are interpolated between them.
Tensor stretch(const Tensor& rows, int64_t count, const std::string& method) {
  // As an image in float32 or wider: [1, embedding_dim, length, 1].
  const Tensor image = rows.to(dispatcher::compute_type(rows)).t().unsqueeze(0).unsqueeze(-1);
  const Tensor result = method == "cubic"
                            ? at::upsample_bicubic2d(image, {count, 1}, /*align_corners=*/true)
                            : at::upsample_bilinear2d(image, {count, 1}, /*align_corners=*/true);
  return result.squeeze(-1).squeeze(0).t().to(rows.scalar_type());
}

Tensor extend(const Tensor& weight, int64_t max_positions, int64_t first_row,
              std::string_view method) {
  check_table(weight, "weight", first_row);
  const int64_t length = weight.size(0) - first_row;
  dispatcher::index_of(method, "method", {"linear", "cubic", "repeat"});
  TORCH_CHECK_VALUE(length > 0, "weight: expected rows to extend, got none");
  TORCH_CHECK_VALUE(max_positions >= length, "max_positions: expected ", length,
                    " or more, which the table has, got ", max_positions);
  dispatcher::check_result({max_positions, weight.size(1)}, at::kDouble, "max_positions");
  const Tensor rows = weight.narrow(0, first_row, length);
  const Tensor longer = method == "repeat" ? repeat(rows, max_positions)
                                           : stretch(rows, max_positions, std::string(method));
  return at::cat({weight.narrow(0, 0, first_row), longer}).contiguous();
}

/// torch.nn.functional.interpolate for an image [1, embedding_dim, rows, columns].
Tensor interpolate(const Tensor& image, c10::SymIntArrayRef size, const Resampling& how) {
  // Without an offset, torch divides the sizes itself.
  const auto scale = [&](int64_t axis, const c10::SymInt& to) -> std::optional<double> {
    if (how.scale_offset() == 0) return std::nullopt;
    const int64_t from = image.sym_size(2 + axis).guard_int(__FILE__, __LINE__);
    return (static_cast<double>(to.guard_int(__FILE__, __LINE__)) + how.scale_offset()) /
           static_cast<double>(from);
  };
  const auto rows = scale(0, size[0]), columns = scale(1, size[1]);
  const bool corners = how.align_corners(), cubic = how.method() == "bicubic";
  if (how.antialias()) {
    return cubic ? at::_upsample_bicubic2d_aa_symint(image, size, corners, rows, columns)
                 : at::_upsample_bilinear2d_aa_symint(image, size, corners, rows, columns);
  }
  return cubic ? at::upsample_bicubic2d_symint(image, size, corners, rows, columns)
               : at::upsample_bilinear2d_symint(image, size, corners, rows, columns);
}

/// The image keeps the order of the table in memory, so it is a view of it.
Tensor resample(const Tensor& weight, c10::SymIntArrayRef grid, c10::SymIntArrayRef new_grid,
                const Resample& call) {
  const Resampling& how = call.how;
  const c10::SymInt first = prefix_of(weight, grid), dim = weight.sym_size(1);
  check_grid(new_grid, "new_grid");
  check_resampling(how);
  dispatcher::check_result({new_grid[0], new_grid[1], dim}, at::kDouble, "new_grid");
  const c10::SymInt count = new_grid[0] * new_grid[1];
  if (dim == 0) return weight.new_empty_symint({first + count, dim});  // torch refuses no channels
  const Tensor cells = weight.narrow_symint(0, first, grid[0] * grid[1])
                           .to(dispatcher::compute_type(weight))
                           .reshape_symint({grid[0], grid[1], dim});
  const Tensor image = cells.permute({2, 0, 1}).unsqueeze(0);
  c10::SymDimVector size(new_grid.begin(), new_grid.end());
  if (how.antialias() && how.method() == "bicubic" && image.requires_grad()) {
    // torch's backward operator of this mode has no Meta kernel for symbolic sizes.
    for (c10::SymInt& length : size) length = length.guard_int(__FILE__, __LINE__);
  }
  const Tensor resampled = interpolate(image, size, how).squeeze(0).permute({1, 2, 0});
  const Tensor patches = resampled.reshape_symint({count, dim}).to(weight.scalar_type());
  return at::cat({weight.narrow_symint(0, 0, first), patches});
}

Tensor positions_of_mask(const Tensor& mask, c10::SymInt past, c10::SymInt skip) {
  const at::ScalarType type = mask.scalar_type();
  TORCH_CHECK_TYPE(type == at::kBool || type == at::kInt || type == at::kLong,
                   "attention_mask: expected bool, int32 or int64, got ",
                   dispatcher::dtype_name(type));
  TORCH_CHECK_VALUE(mask.dim() >= 1, "attention_mask: expected [..., seq], got a number");
  dispatcher::check_length(past, "past_length");
  TORCH_CHECK_VALUE(skip >= 0 && skip <= mask.sym_size(-1), "past_length: expected 0 to ",
                    mask.sym_size(-1), ", the length of the mask, got ", skip);
  const Tensor kept = mask.to(at::kBool).to(at::kLong);
  const Tensor positions = at::cumsum(kept, -1).add(past).mul(kept).sub(1);
  return positions.slice_symint(-1, skip);
}

}  // namespace

void check_grid(c10::SymIntArrayRef grid, const char* argument) {
  TORCH_CHECK_VALUE(grid.size() == 2 && grid[0] >= 1 && grid[1] >= 1, argument,
                    ": expected the numbers of rows and columns, each 1 or more, got ", grid);
  dispatcher::product(grid[0], grid[1], argument);
}

c10::SymInt prefix_of(const Tensor& weight, c10::SymIntArrayRef grid) {
  check_table(weight, "weight", 0);
  check_grid(grid, "grid");
  const c10::SymInt rows = weight.sym_size(0);
  TORCH_CHECK_VALUE(grid[0] * grid[1] <= rows, "grid: expected at most ", rows,
                    " cells, the rows of weight, got ", grid);
  return rows - grid[0] * grid[1];
}

void check_resampling(const Resampling& how) {
  dispatcher::index_of(how.method(), "method", {"bicubic", "bilinear"});
  TORCH_CHECK_VALUE(std::isfinite(how.scale_offset()) && how.scale_offset() >= 0,
                    "scale_offset: expected a finite number of at least 0, got ",
                    how.scale_offset());
}

namespace {

// ---------------------------------------------------------------------------------------- gradient
// Derivatives of the learned-position operators. Adding rows and summing them are each other's
// transpose, so nodes save only positions.

/// `count`: rows of the table.
dispatcher::variable_list add_gradient(const dispatcher::Gradients& gradients, const Rows& rows,
                                       const c10::SymInt& count) {
  if (!gradients.needs(1)) return {gradients[0], Tensor()};
  return {gradients[0], learned_backward(gradients[0], count, rows)};
}

/// The tangent of x + rows of weight, from the tangents of both.
Tensor add_tangent(const Tensor& x, const Tensor& weight, const Rows& rows) {
  const Tensor table_tangent = dispatcher::tangent(weight);
  if (!table_tangent.defined()) return dispatcher::copied_tangent(x);
  Tensor direction = dispatcher::tangent(x);
  if (!direction.defined()) direction = at::zeros_like(x);
  return learned_add(direction, table_tangent, rows);
}

Tensor add_autograd(const Tensor& x, const Tensor& weight, const Rows& rows) {
  auto node = dispatcher::node_for<dispatcher::FunctionNode<learned_add, add_gradient>>(x, weight);
  if (node && weight.requires_grad()) node->save(rows, weight.sym_size(0));
  Tensor output = dispatcher::recorded(node, [&] { return learned_add(x, weight, rows); });
  dispatcher::set_tangent(output, add_tangent(x, weight, rows));
  return output;
}

Tensor encode_transpose(const Tensor& gradient, const dispatcher::Shape& table,
                        const Tensor& positions, int64_t first_row) {
  return token::embedding_backward(gradient, table.sizes[0], {at::add(positions, first_row)});
}

/// A look-up of the rows that learned_backward summed into.
Tensor backward_transpose(const Tensor& table, const dispatcher::Shape& gradient,
                          const c10::SymInt&, const Rows& rows) {
  const Tensor looked_up =
      rows.positions.has_value()
          ? learned_encode(table, *rows.positions, rows.first_row)
          : table.narrow_symint(0, rows.offset.number() + rows.first_row, gradient.sizes[1]);
  return looked_up.expand_symint({gradient.sizes[0], gradient.sizes[1], table.sym_size(1)});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  const std::string rows = "Tensor? positions=None, SymInt offset=0, int first_row=0";
  define(m, "learned_add(Tensor x, Tensor weight, " + rows + ") -> Tensor");
  define(m, "learned_backward(Tensor gradient, SymInt num_rows, " + rows + ") -> Tensor");
  define(m, "learned_encode(Tensor weight, Tensor positions, int first_row=0) -> Tensor");
  define(m,
         "learned_extend("
         "Tensor weight, "
         "int max_positions, "
         "int first_row=0, "
         "str method=\"linear\") -> Tensor");
  const std::string resampling = resampling_schema("bicubic");
  define(m,
         "learned_resample("
         "Tensor weight, "
         "SymInt[] grid, "
         "SymInt[] new_grid, " +
             resampling + ") -> Tensor");
  define(m,
         "learned_packed("
         "Tensor weight, "
         "SymInt[] grid, "
         "Tensor grids, "
         "int merge=1, "
         "SymInt? num_tokens=None, " +
             resampling + ") -> Tensor");
  define(m, "learned_positions(Tensor mask, SymInt past=0, SymInt skip=0) -> Tensor");
  learned_add.implement<empty_sum, add>(m);
  learned_add.autocast<add_autocast>(m);
  learned_encode.implement<empty_rows, encode>(m);
  learned_backward.implement<table_shape, backward>(m);
  learned_packed.compose<compute_packed>(m);
  learned_extend.compose<extend>(m);
  learned_resample.compose<resample>(m);
  learned_positions.compose<positions_of_mask>(m);
  learned_add.differentiate<add_autograd>(m);
  dispatcher::differentiate_linear<learned_encode, encode_transpose>(m);
  dispatcher::differentiate_linear<learned_backward, backward_transpose>(m);
}

}  // namespace posembed::learned
