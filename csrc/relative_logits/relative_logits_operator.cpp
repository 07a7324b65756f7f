// The operators of relative logits. Products are computed for a block of queries at a time,
// gathered and dropped. On the CPU a block belongs to one sample and head, and is multiplied by the
// rows that its queries use; threads share out blocks, and each product runs on one thread.
#include "relative_logits/relative_logits_operator.h"

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "core/index.h"
#include "dispatcher/autograd.h"
#include "dispatcher/launch.h"
#include "dispatcher/output_memory.h"
#include "relative_logits/relative_logits.h"

namespace posembed::relative_logits {
namespace {

using Two = std::tuple<Tensor, Tensor>;

// ----------------------------------------------------------------------------------- checks

/// [batch, heads, queries, keys]
c10::SymDimVector score_sizes(const Factors& factors) {
  const auto& [query, table, rows, scale, by_key] = factors;
  return {query.sym_size(0), query.sym_size(1), rows.sym_size(-2), rows.sym_size(-1)};
}

void check_factors(const Factors& factors) {
  const auto& [query, table, rows, scale, by_key] = factors;
  // query: [batch, heads, queries, dim], or keys; table: [rows, dim] or [heads, rows, dim]
  dispatcher::check_floating(query, "query");
  dispatcher::check_rank(query, "query", 4, "[batch, heads, queries, dim]");
  dispatcher::check_same_dtype(table, "table", query, "query");
  TORCH_CHECK_VALUE(table.dim() == 2 || table.dim() == 3,
                    "table: expected [rows, dim] or [heads, rows, dim], got ", table.sym_sizes());
  if (table.dim() == 3) {
    dispatcher::check_size(table.sym_size(0), query.sym_size(1), "table", "heads");
  }
  dispatcher::check_size(table.sym_size(-1), query.sym_size(3), "table", "dim");
  TORCH_CHECK_VALUE(table.sym_size(-2) >= 1, "table: expected at least 1 row, got ",
                    table.sym_sizes());
  // rows: [queries, keys], [batch, queries, keys] or [axes, batch, queries, keys]
  dispatcher::check_integers(rows, "rows");
  TORCH_CHECK_VALUE(rows.dim() >= 2 && rows.dim() <= 4,
                    "rows: expected [queries, keys], [batch, queries, keys] or "
                    "[axes, batch, queries, keys], got ",
                    rows.sym_sizes());
  dispatcher::check_size(rows.sym_size(by_key ? -1 : -2), query.sym_size(2), "rows",
                         by_key ? "keys" : "queries");
  if (rows.dim() > 2) dispatcher::check_batch(rows.sym_size(-3), query.sym_size(0), "rows");
  dispatcher::check_result(score_sizes(factors), query.scalar_type(), "rows");
}

void check_scores(const Tensor& scores, const char* argument, const Factors& factors) {
  dispatcher::check_same_dtype(scores, argument, factors.query, "query");
  const c10::SymDimVector expected = score_sizes(factors);
  TORCH_CHECK_VALUE(scores.sym_sizes() == c10::SymIntArrayRef(expected), argument, ": expected ",
                    c10::SymIntArrayRef(expected), ", got ", scores.sym_sizes());
}

// --------------------------------------------------------------------------------------- blocks

/// Numbers in the products of a block: 256 KiB of float32 on the CPU, 64 MiB on CUDA.
constexpr int64_t products_on_cpu = int64_t{1} << 16, products_on_cuda = int64_t{1} << 24;

/// Partial sums of the table's gradient, which fix the order of additions for any number of
/// threads.
constexpr int64_t parts_of_gradient = 32;

/// Inside an operator, products are plain: autograd and autocast have had their turn.
struct PlainProducts {
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard disabled{c10::autocast_dispatch_keyset};
};

/// The tensors of a call, or of a part of one. A gather reads scores, if there are any, and writes
/// `out`; a scatter reads the gradient as scores and writes `of_query`, if it is defined.
/// query: [batch, heads, places, dim]; table: [heads or 1, rows, dim], in the compute type on the
/// CPU; rows: int32 [axes, batch or 1, queries, keys], keys contiguous
struct Problem : Factors {
  Tensor scores, out;                                   // [batch, heads, queries, keys]
  Tensor of_query;                                      // like query
  std::shared_ptr<const std::vector<QueryRows>> lines;  // [axes, batch or 1, queries], on the CPU
  const int32_t* first_line = nullptr;                  // the rows of the first line

  int64_t planes() const { return query.size(0) * query.size(1); }
  int64_t places() const { return query.size(2); }

  /// The part [first, first + count) of the batch (dim 0), the heads (1) or the places (2).
  Problem part(int64_t dim, int64_t first, int64_t count) const {
    const int64_t of_scores = dim == 2 && by_key ? 3 : dim;
    Problem result = *this;
    result.query = query.narrow(dim, first, count);
    if (scores.defined()) result.scores = scores.narrow(of_scores, first, count);
    if (out.defined()) result.out = out.narrow(of_scores, first, count);
    if (of_query.defined()) result.of_query = of_query.narrow(dim, first, count);
    if (dim == 0 && rows.size(1) > 1) result.rows = rows.narrow(1, first, count);
    if (dim == 1 && table.size(0) > 1) result.table = table.narrow(0, first, count);
    if (dim == 2) result.rows = rows.narrow(of_scores, first, count);
    return result;
  }

  /// The arguments of kernels, without products.
  Block block() const {
    const auto strides = [](const Tensor& tensor, int64_t* stride) {
      for (int64_t i = 0; i < 3; ++i) stride[i] = tensor.stride(i);
    };
    Block block;
    block.rows = rows.const_data_ptr<int32_t>();
    strides(rows, block.row_stride);
    if (rows.size(1) == 1) block.row_stride[1] = 0;
    if (scores.defined()) {
      block.scores = scores.const_data_ptr();
      strides(scores, block.score_stride);
    }
    if (out.defined()) {
      block.out = out.mutable_data_ptr();
      strides(out, block.out_stride);
    }
    block.keys = rows.size(3);
    if (lines) block.lines = lines->data() + (block.rows - first_line) / block.keys;
    block.row_count = table.size(1);
    block.scalar = dispatcher::scalar_of(query);
    block.axes = rows.size(0);
    block.batch = query.size(0);
    block.heads = query.size(1);
    block.queries = rows.size(2);
    block.scale = scale;
    block.by_key = by_key;
    block.error = dispatcher::device_error(query.device());
    return block;
  }
};

/// Rows as kernels read them. The CPU refuses those outside the table; CUDA kernels record them.
Tensor kernel_rows(const Tensor& rows, int64_t count) {
  Tensor dense = rows.contiguous();
  if (dispatcher::on_cuda(rows)) {
    if (rows.scalar_type() != at::kInt) dense = dense.clamp(hidden_row - 1, count).to(at::kInt);
  } else {
    const core::IndexView view = dispatcher::index_view(dense);
    const int64_t bad = core::find_outside(view, dense.numel(), hidden_row, count);
    TORCH_CHECK_INDEX(bad < 0, "rows: expected 0 to ", count - 1, ", a row of the table, -1 or -2",
                      ", got ", core::read(view, bad), " at index ", bad);
    dense = dense.to(at::kInt);
  }
  while (dense.dim() < 4) dense = dense.unsqueeze(0);
  return dense;
}

/// Finds the runs of all queries once for all heads.
void find_lines(Problem& problem) {
  const Tensor& rows = problem.rows;
  const int64_t keys = rows.size(3);
  problem.first_line = rows.const_data_ptr<int32_t>();
  std::vector<QueryRows> lines(static_cast<size_t>(rows.numel() / keys));
  at::parallel_for(0, static_cast<int64_t>(lines.size()), 64, [&](int64_t begin, int64_t end) {
    std::vector<Run> memory(static_cast<size_t>(keys));
    for (int64_t i = begin; i < end; ++i) {
      QueryRows& line = lines[static_cast<size_t>(i)];
      int64_t count = 0;
      find_runs_cpu(problem.first_line + i * keys, keys, memory.data(), count, line);
      line.runs.assign(memory.begin(), memory.begin() + count);
    }
  });
  problem.lines = std::make_shared<const std::vector<QueryRows>>(std::move(lines));
}

Problem problem_of(const Factors& factors, const Tensor& scores) {
  Problem problem{factors, scores, {}, {}, {}};
  Tensor& table = problem.table;
  if (table.dim() == 2) table = table.unsqueeze(0);
  if (!dispatcher::on_cuda(table)) table = table.to(dispatcher::compute_type(table));
  problem.rows = kernel_rows(factors.rows, table.size(1));
  const bool on_cpu = !dispatcher::on_cuda(table);
  if (on_cpu && !factors.by_key && problem.rows.numel() > 0) find_lines(problem);
  return problem;
}

// ------------------------------------------------------------------------------------------ CPU

/// A block of places of one sample and head, with its factors in the compute type.
struct Item {
  Problem part;
  Block block;   // of the rows that it uses; without products
  Tensor query;  // [places, dim]
  Tensor table;  // [rows of the block, dim]
};

int64_t places_of_item(const Problem& problem) {
  return std::clamp<int64_t>(products_on_cpu / problem.table.size(1), 16, 128);
}

int64_t items_of_plane(const Problem& problem) {
  const int64_t size = places_of_item(problem);
  return (problem.places() + size - 1) / size;
}

/// Items of a head follow one another.
Item item_of(const Problem& problem, int64_t number) {
  const int64_t of_plane = items_of_plane(problem), size = places_of_item(problem);
  const int64_t plane = number / of_plane, first = number % of_plane * size;
  const int64_t batch = problem.query.size(0);
  Item item;
  item.part = problem.part(0, plane % batch, 1)
                  .part(1, plane / batch, 1)
                  .part(2, first, std::min(size, problem.places() - first));
  item.block = item.part.block();
  narrow_rows_cpu(item.block);
  item.query = item.part.query.select(0, 0).select(0, 0).to(problem.table.scalar_type());
  item.table = item.part.table.select(0, 0).narrow(0, item.block.first_row, item.block.row_count);
  return item;
}

/// Calls function(number) for [0, count) on torch's threads.
template <typename Function>
void on_threads(int64_t count, const Function& function) {
  // One number more than there are: a single one would run outside the threads, and its products
  // on all of them, whose sums may differ in order.
  at::parallel_for(0, count + 1, 1, [&](int64_t begin, int64_t end) {
    const PlainProducts plain;
    for (int64_t number = begin; number < std::min(end, count); ++number) function(number);
  });
}

void gather_on_cpu(const Problem& problem) {
  on_threads(problem.planes() * items_of_plane(problem), [&](int64_t number) {
    Item item = item_of(problem, number);
    const Tensor products = at::mm(item.query, item.table.t());
    item.block.products = products.mutable_data_ptr();
    gather_cpu(item.block);
  });
}

/// Writes the gradient of an item's queries, and adds that of the table to `of_table` [rows, dim],
/// if it is defined.
void scatter_item(const Problem& problem, int64_t number, const Tensor& of_table) {
  Item item = item_of(problem, number);
  const Tensor products =
      at::zeros({item.query.size(0), item.block.row_count}, item.table.options());
  item.block.products = products.mutable_data_ptr();
  scatter_cpu(item.block);
  if (item.part.of_query.defined()) {
    item.part.of_query.select(0, 0).select(0, 0).copy_(at::mm(products, item.table));
  }
  if (of_table.defined()) {
    of_table.narrow(0, item.block.first_row, item.block.row_count).addmm_(products.t(), item.query);
  }
}

/// Returns the gradient of the table, in the compute type, if it is needed.
Tensor scatter_on_cpu(const Problem& problem, bool table_gradient) {
  const int64_t heads = problem.table.size(0);
  const int64_t of_head = problem.planes() * items_of_plane(problem) / heads;
  const int64_t parts = std::max<int64_t>(1, std::min(of_head, parts_of_gradient / heads));
  Tensor sums;
  if (table_gradient) {
    sums = at::zeros({parts, heads, problem.table.size(1), problem.table.size(2)},
                     problem.table.options());
  }
  on_threads(heads * parts, [&](int64_t number) {
    const int64_t head = number / parts, part = number % parts;
    const Tensor of_table = table_gradient ? sums.select(0, part).select(0, head) : Tensor();
    for (int64_t i = of_head * part / parts; i < of_head * (part + 1) / parts; ++i) {
      scatter_item(problem, head * of_head + i, of_table);
    }
  });
  for (int64_t part = 1; table_gradient && part < parts; ++part) {
    sums.select(0, 0).add_(sums.select(0, part));
  }
  return table_gradient ? sums.select(0, 0) : sums;
}

// ----------------------------------------------------------------------------------------- CUDA

/// Calls visit(part) for blocks of places.
template <typename Visit>
void on_cuda_blocks(const Problem& problem, const Visit& visit) {
  const PlainProducts plain;
  const int64_t of_place = std::max<int64_t>(1, problem.planes() * problem.table.size(1));
  const int64_t most = std::max<int64_t>(1, products_on_cuda / of_place);
  for (int64_t first = 0; first < problem.places(); first += most) {
    visit(problem.part(2, first, std::min(most, problem.places() - first)));
  }
}

/// left [n, .., k] times right [n, k, ..], in float32 for 16-bit factors.
Tensor wide_product(const Tensor& left, const Tensor& right) {
  const at::ScalarType wide = dispatcher::compute_type(left);
  const bool narrow = wide != left.scalar_type() && left.scalar_type() == right.scalar_type();
  if (narrow && left.is_cuda()) return at::bmm(left, right, wide);
  return at::bmm(left.to(wide), right.to(wide));
}

/// query [batch, heads, places, dim] times the table: [batch, heads, places, rows].
Tensor products_of(const Problem& problem) {
  const Tensor &query = problem.query, &table = problem.table;
  const bool shared = table.size(0) == 1;
  const Tensor rows = shared ? table : table.expand({query.size(0), -1, -1, -1}).flatten(0, 1);
  const Tensor left = query.reshape({rows.size(0), -1, query.size(3)});
  return wide_product(left.contiguous(), rows.contiguous().transpose(1, 2))
      .view({query.size(0), query.size(1), query.size(2), table.size(1)});
}

template <typename Cuda>
void launch_block(const Problem& part, const Tensor& products, const Cuda& cuda) {
  Block block = part.block();
  block.products = products.mutable_data_ptr();
  const auto cpu = [](const Block&, int64_t, int64_t) {};
  dispatcher::launch(block, products, 0, 0, cpu, cuda);
}

void gather_on_cuda(const Problem& problem) {
  on_cuda_blocks(problem, [&](const Problem& part) {
    launch_block(part, products_of(part), POSEMBED_CUDA_LAUNCHER(gather_cuda));
  });
}

/// products [batch, heads, places, rows] times query [batch, heads, places, dim], summed over all
/// but heads: [heads or 1, rows, dim], in float32 for 16-bit factors.
Tensor sum_products(const Tensor& products, const Tensor& query, int64_t heads) {
  const auto flat = [heads](const Tensor& tensor) {  // [heads or 1, batch * places, ..]
    const Tensor first = heads == 1 ? tensor : tensor.transpose(0, 1);
    return first.reshape({heads, -1, tensor.size(3)});
  };
  return wide_product(flat(products).transpose(1, 2), flat(query));
}

Tensor scatter_on_cuda(const Problem& problem, bool table_gradient) {
  const Tensor& table = problem.table;
  const auto options = table.options().dtype(dispatcher::compute_type(table));
  Tensor total;
  if (table_gradient) total = at::zeros(table.sizes(), options);
  on_cuda_blocks(problem, [&](const Problem& part) {
    const Tensor& query = part.query;
    const Tensor sums =
        at::zeros({query.size(0), query.size(1), query.size(2), table.size(1)}, options);
    launch_block(part, sums, POSEMBED_CUDA_LAUNCHER(scatter_cuda));
    // Sums are not rounded to 16 bits before they are multiplied.
    if (part.of_query.defined()) {
      const Tensor rows = (table.size(0) == 1 ? table.select(0, 0) : table).to(sums.scalar_type());
      part.of_query.copy_(at::matmul(sums, rows));
    }
    if (table_gradient) total.add_(sum_products(sums, query, table.size(0)));
  });
  return total;
}

// ------------------------------------------------------------------------------------ operators

/// out = scores, which may be undefined, + the logits.
void add_to(const Tensor& scores, const Factors& factors, const Tensor& out) {
  Problem problem = problem_of(factors, scores);
  problem.out = out;
  if (out.numel() == 0) return;
  dispatcher::on_cuda(out) ? gather_on_cuda(problem) : gather_on_cpu(problem);
}

Tensor empty_logits(const Factors& factors, const MaybeTensor& scores) {
  check_factors(factors);
  if (scores.has_value()) check_scores(*scores, "scores", factors);
  return dispatcher::empty_symint(score_sizes(factors), factors.query.options());
}

void fill_logits(const Factors& factors, const MaybeTensor& scores, const Tensor& out) {
  add_to(scores.has_value() ? dispatcher::with_contiguous_last_dim(*scores) : Tensor(), factors,
         out);
}

void check_in_place(const Tensor& scores, const Factors& factors) {
  check_factors(factors);
  check_scores(scores, "scores", factors);
  dispatcher::check_writable(scores, "scores");
}

void change_scores(const Tensor& scores, const Factors& factors) {
  add_to(scores, factors, scores);
}

Two empty_gradients(const Tensor& gradient, const Factors& factors, bool query_gradient,
                    bool table_gradient) {
  check_factors(factors);
  check_scores(gradient, "gradient", factors);
  const auto empty = [](const Tensor& tensor, bool needed) {
    const c10::SymDimVector none = {0};
    return dispatcher::empty_symint(needed ? tensor.sym_sizes() : c10::SymIntArrayRef(none),
                                    tensor.options());
  };
  return {empty(factors.query, query_gradient), empty(factors.table, table_gradient)};
}

void fill_gradients(const Tensor& gradient, const Factors& factors, bool query_gradient,
                    bool table_gradient, const Two& results) {
  const Tensor in = dispatcher::with_contiguous_last_dim(gradient);
  Problem problem = problem_of(factors, in);
  if (query_gradient) problem.of_query = std::get<0>(results);
  const auto scatter = dispatcher::on_cuda(in) ? scatter_on_cuda : scatter_on_cpu;
  const Tensor total = scatter(problem, table_gradient);
  if (table_gradient) std::get<1>(results).copy_(total.view(factors.table.sizes()));
}

/// In the dtype in which autocast computes products.
Tensor logits_autocast(const Factors& factors, const MaybeTensor& scores) {
  const c10::DeviceType device = factors.query.device().type();
  const auto lowered = [&](const auto& tensor) {
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), tensor, device);
  };
  Factors cast = factors;
  cast.query = lowered(factors.query);
  cast.table = lowered(factors.table);
  return relative_logits(cast, lowered(scores));
}

/// In the dtype of the scores, which cannot change.
void in_place_autocast(const Tensor& scores, const Factors& factors) {
  Factors cast = factors;
  cast.query = dispatcher::follow(factors.query, scores);
  cast.table = dispatcher::follow(factors.table, scores);
  relative_logits_(scores, cast);
}

// -------------------------------------------------------------------------------------------- rows
// The row of each pair of a query and a key in a table of relative positions. ALiBi's bias with
// slope 1 is the distance, which is exact in float64; ALiBi's checks, positions and documents thus
// serve here too.

/// Distances float64 [queries, keys] or [batch, queries, keys]; -infinity where a key is hidden.
Tensor distances_of(const Tensor& like, const c10::SymInt& queries, const c10::SymInt& keys,
                    alibi::Call call) {
  call.apply_mask(true);
  const at::TensorOptions options = at::TensorOptions(like.device()).dtype(at::kDouble);
  // slopes: [1], or [2, 1] for keys left and right of the query
  const Tensor slopes =
      call.causal() ? at::ones({1}, options) : at::arange(1, -2, -2, options).unsqueeze(1);
  return alibi::alibi_bias(slopes, queries, keys, {}, call).select(-3, 0);
}

/// One axis of positions [axes, …].
alibi::Call of_axis(alibi::Call call, int64_t axis, int64_t axes) {
  const auto select = [&](const alibi::MaybeTensor& positions, const char* argument) {
    TORCH_CHECK_VALUE(
        positions.has_value() && positions->dim() >= 2 && positions->sym_size(0) == axes, argument,
        ": expected [", axes, ", length] or [", axes, ", batch, length] for the ", axes,
        " axes of num_buckets, got ",
        positions.has_value() ? positions->sym_sizes() : c10::SymIntArrayRef());
    return positions->select(0, axis);
  };
  call.query_positions(select(call.query_positions(), "query_positions"));
  call.key_positions(select(call.key_positions(), "key_positions"));
  return call;
}

/// [queries, keys] or [batch, queries, keys], or [axes, batch, queries, keys] of several axes,
/// whose tables follow one another. Of a grid, the rows of all axes are one number.
Tensor rows_of(const Tensor& like, c10::SymInt queries, c10::SymInt keys,
               at::IntArrayRef num_buckets, const Pairs& pairs) {
  const auto axes = static_cast<int64_t>(num_buckets.size());
  TORCH_CHECK_VALUE(axes >= 1, "num_buckets: expected a number for each axis, got none");
  const bool is_grid = pairs.bucketing.kind == RelativeBuckets::grid;
  std::vector<Tensor> rows;
  int64_t first = 0;
  for (int64_t axis = 0; axis < axes; ++axis) {
    const int64_t count = num_buckets[static_cast<size_t>(axis)];
    const Tensor distances =
        distances_of(like, queries, keys, axes == 1 ? pairs.call : of_axis(pairs.call, axis, axes));
    const Tensor hidden = distances.isinf();
    const Tensor buckets = relative_bias::relative_buckets(
        distances.masked_fill(hidden, 0).to(at::kLong), count, pairs.bucketing);
    const int64_t other = pairs.call.apply_mask() ? hidden_row : no_row;
    Tensor row = buckets + first;
    if (is_grid && axis > 0) row = rows.back() * count + buckets;
    if (pairs.bucketing.kind == RelativeBuckets::band) {
      row = row.masked_fill(buckets.lt(0), no_row);
    }
    row = row.masked_fill(hidden, other);
    if (is_grid) rows.clear();
    rows.push_back(row);
    first += is_grid ? 0 : count;
  }
  if (rows.size() == 1) return rows[0];
  const Tensor all = at::stack(rows);
  return all.dim() == 3 ? all.unsqueeze(1) : all;
}

// ---------------------------------------------------------------------------------------- gradient
// Derivatives of relative logits, which are linear in the query, in the table and in scores that
// are added. Hidden keys have no derivative.

using dispatcher::Gradients;
using dispatcher::primal;
using dispatcher::tangent;
using dispatcher::variable_list;

MaybeTensor maybe(const Tensor& tensor) {
  return tensor.defined() ? MaybeTensor(tensor) : std::nullopt;
}

Factors with(Factors factors, const Tensor& query, const Tensor& table) {
  factors.query = query;
  factors.table = table;
  return factors;
}

/// `sum`, which may be undefined, + the logits of a derivative, where hidden keys have 0.
void add_derived(Tensor& sum, Factors factors, const Tensor& query, const Tensor& table) {
  if (!query.defined() || !table.defined()) return;
  factors.rows = factors.rows.clamp_min(no_row);
  sum = relative_logits(with(factors, query, table), maybe(sum));
}

variable_list logits_gradient(const Gradients& gradients, const Factors& factors) {
  variable_list result{Tensor(), Tensor(), gradients[0]};
  if (!gradients.needs(0) && !gradients.needs(1)) return result;
  const auto [of_query, of_table] =
      relative_logits_backward(gradients[0], factors, gradients.needs(0), gradients.needs(1));
  if (gradients.needs(0)) result[0] = of_query;
  if (gradients.needs(1)) result[1] = of_table;
  return result;
}

/// `has_query`, `has_table`: whether relative_logits_backward computed these results.
variable_list backward_gradient(const Gradients& gradients, const Tensor& gradient,
                                const Factors& given, bool has_query, bool has_table) {
  const Tensor of_query = has_query ? gradients[0] : Tensor(),
               of_table = has_table ? gradients[1] : Tensor();
  variable_list result(3);
  if (gradients.needs(0)) {
    add_derived(result[0], given, of_query, given.table);
    add_derived(result[0], given, given.query, of_table);
  }
  if (gradients.needs(1) && of_table.defined()) {
    const Factors changed = with(given, given.query, of_table);
    result[1] = std::get<0>(relative_logits_backward(gradient, changed, true, false));
  }
  if (gradients.needs(2) && of_query.defined()) {
    const Factors changed = with(given, of_query, given.table);
    result[2] = std::get<1>(relative_logits_backward(gradient, changed, false, true));
  }
  return result;
}

Tensor logits_autograd(const Factors& factors, const MaybeTensor& scores) {
  const auto& [query, table, rows, scale, by_key] = factors;
  using Node = dispatcher::FunctionNode<relative_logits, logits_gradient>;
  auto node = dispatcher::node_for<Node>(query, table, scores.value_or(Tensor()));
  if (node) node->save(factors);
  Tensor output = dispatcher::recorded(node, [&] { return relative_logits(factors, scores); });
  Tensor direction = scores.has_value() ? dispatcher::copied_tangent(*scores) : Tensor();
  add_derived(direction, factors, tangent(query), primal(table));
  add_derived(direction, factors, primal(query), tangent(table));
  dispatcher::set_tangent(output, direction);
  return output;
}

/// The tangents of both gradients; a gradient that is not needed has none.
void set_backward_tangents(const Tensor& gradient, const Factors& factors, const Two& results,
                           bool has_query, bool has_table) {
  Tensor of_query, of_table;
  const auto add = [&](const Tensor& g, const Tensor& q, const Tensor& t, bool first, bool second) {
    if (!g.defined() || !q.defined() || !t.defined() || !(first || second)) return;
    const auto [a, b] = relative_logits_backward(g, with(factors, q, t), first, second);
    if (first) of_query = dispatcher::accumulate(of_query, a);
    if (second) of_table = dispatcher::accumulate(of_table, b);
  };
  const Tensor g = primal(gradient), q = primal(factors.query), t = primal(factors.table);
  add(tangent(gradient), q, t, has_query, has_table);
  add(g, tangent(factors.query), t, false, has_table);
  add(g, q, tangent(factors.table), has_query, false);
  dispatcher::set_tangent(std::get<0>(results), of_query);
  dispatcher::set_tangent(std::get<1>(results), of_table);
}

Two backward_autograd(const Tensor& gradient, const Factors& factors, bool query_gradient,
                      bool table_gradient) {
  using Node = dispatcher::FunctionNode<relative_logits_backward, backward_gradient>;
  auto node = dispatcher::node_for<Node>(gradient, factors.query, factors.table);
  if (node) node->save(gradient, factors, query_gradient, table_gradient);
  const Two results = dispatcher::recorded(node, [&] {
    return relative_logits_backward(gradient, factors, query_gradient, table_gradient);
  });
  set_backward_tangents(gradient, factors, results, query_gradient, table_gradient);
  return results;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  const std::string factors =
      "Tensor query, Tensor table, Tensor rows, float scale=1.0, bool by_key=False";
  define(m, "relative_logits(" + factors + ", Tensor? scores=None) -> Tensor");
  define(m, "relative_logits_(Tensor(a!) scores, " + factors + ") -> ()");
  define(m, "relative_logits_backward(Tensor gradient, " + factors +
                ", bool query_gradient=True, bool table_gradient=True) -> (Tensor, Tensor)");
  define(m,
         "relative_rows("
         "Tensor like, "
         "SymInt query_length, "
         "SymInt key_length, "
         "int[] num_buckets, " +
             std::string(relative_bias::bucketing_schema) + ", " + alibi::call_schema("False") +
             ") -> Tensor");
  relative_logits.implement<empty_logits, fill_logits>(m);
  relative_logits.autocast<logits_autocast>(m);
  relative_logits_.implement<check_in_place, change_scores>(m);
  relative_logits_.autocast<in_place_autocast>(m);
  relative_logits_backward.implement<empty_gradients, fill_gradients>(m);
  relative_rows.compose<rows_of>(m);
  relative_logits.differentiate<logits_autograd>(m);
  relative_logits_.refuse_gradients(m);
  relative_logits_backward.differentiate<backward_autograd>(m);
}

}  // namespace posembed::relative_logits
