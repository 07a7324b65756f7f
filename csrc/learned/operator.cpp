// The learned-position operators: rows of a table added to x, looked up alone, and the table's
// gradient. Consecutive positions need neither ids nor a sort, because their gradient is a sum over
// the batch.
#include "learned/operator.h"

#include <ATen/ops/add.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "core/index_range.h"
#include "dispatcher/autocast.h"
#include "dispatcher/checks.h"
#include "dispatcher/launch.h"
#include "dispatcher/output_memory.h"
#include "learned/kernel.h"
#include "token/operator.h"

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
  c10::SymDimVector sizes(positions.sym_sizes().begin(), positions.sym_sizes().end());
  sizes.push_back(weight.sym_size(1));
  return dispatcher::empty_symint(sizes, weight.options());
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
  TORCH_CHECK_VALUE(offset >= 0, "offset: expected 0 or more, got ", offset);
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

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  learned_add.implement<empty_sum, add>(m);
  learned_add.autocast<add_autocast>(m);
  learned_encode.implement<empty_rows, encode>(m);
  learned_backward.implement<table_shape, backward>(m);
}

}  // namespace posembed::learned
