// The token operators: look-up, and the table's gradient, dense or as the rows that were touched.
// The gradient sorts ids instead of scattering with atomics, so any number of threads gives the
// same bits.
#include "token/operator.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>

#include "core/brief.h"
#include "core/index_range.h"
#include "core/stream_bytes.h"
#include "dispatcher/checks.h"
#include "dispatcher/cuda_scope.h"
#include "dispatcher/launch.h"
#include "dispatcher/output_memory.h"
#include "token/kernel.h"
#include "token/sorted_ids.h"

namespace posembed::token {
namespace {

// ------------------------------------------------------------------------------------- checks

/// The row of id 0 in a table whose first row has id `vocabulary_start`; -1: the whole vocabulary.
int64_t first_row(int64_t vocabulary_start) { return -std::max<int64_t>(0, vocabulary_start); }

SortedIds sorted_ids(const Gradient& gradient) {
  return sort_ids(gradient.ids, gradient.num_embeddings, gradient.padding_idx,
                  first_row(gradient.vocabulary_start));
}

/// The largest vocabulary_start, so that comparisons with ids cannot overflow.
constexpr int64_t max_vocabulary_start = int64_t{1} << 62;

void check_vocabulary(int64_t vocabulary_start) {
  TORCH_CHECK_VALUE(vocabulary_start >= -1 && vocabulary_start <= max_vocabulary_start,
                    "vocabulary_start: expected -1 (the table is the whole vocabulary) or 0 to ",
                    "2^62, got ", vocabulary_start);
}

void check(const Tensor& weight, const Ids& in, Text gradient) {
  dispatcher::check_floating(weight, "weight");
  dispatcher::check_rank(weight, "weight", 2, "[num_embeddings, embedding_dim]");
  dispatcher::check_integers(in.ids, "ids");
  check_vocabulary(in.vocabulary_start);
  const bool fits = in.vocabulary_start >= 0 || in.padding_idx < weight.sym_size(0);
  TORCH_CHECK_VALUE(in.padding_idx >= -1 && fits,
                    "padding_idx: expected -1 (none) or a row of the table of ", weight.sym_size(0),
                    " rows, got ", in.padding_idx);
  check_gradient_form(gradient);
}

void check_gradient(const Tensor& gradient, const c10::SymInt& num_embeddings, const Ids& in) {
  check_vocabulary(in.vocabulary_start);
  dispatcher::check_floating(gradient, "gradient");
  dispatcher::check_integers(in.ids, "ids");
  TORCH_CHECK_VALUE(gradient.dim() == in.ids.dim() + 1 &&
                        gradient.sym_sizes().slice(0, in.ids.dim()) == in.ids.sym_sizes(),
                    "gradient: expected the shape of ids, ", in.ids.sym_sizes(),
                    ", and embedding_dim, got ", gradient.sym_sizes());
  check_table_size(in.ids, num_embeddings, gradient);
}

// ------------------------------------------------------------------------------------- look-up

Tensor empty_rows(const Tensor& weight, const Ids& in, Text gradient) {
  check(weight, in, gradient);
  c10::SymDimVector sizes(in.ids.sym_sizes().begin(), in.ids.sym_sizes().end());
  sizes.push_back(weight.sym_size(1));
  return dispatcher::empty_symint(sizes, weight.options());
}

void gather_rows(const Tensor& weight, const Ids& in, Text, const Tensor& out) {
  const Tensor ids = in.ids.contiguous();
  const bool partial = in.vocabulary_start >= 0;
  if (!dispatcher::on_cuda(ids) && !partial) check_ids(ids, weight.size(0));
  gather(weight, ids,
         {first_row(in.vocabulary_start), in.scale, core::ErrorKind::token_id, partial}, out);
}

// ------------------------------------------------------------------------- the table's gradient

Sources sources_of(const Gradient& gradient) {
  Sources sources;
  if (gradient.sources.defined()) {
    sources.rows = reinterpret_cast<const uint32_t*>(gradient.sources.const_data_ptr<int32_t>());
  }
  if (gradient.factors.defined()) sources.factors = gradient.factors.const_data_ptr();
  return sources;
}

SumArguments sum_arguments(const Gradient& gradient, const SortedIds& sorted, const Tensor& out) {
  SumArguments arguments;
  arguments.gradient = gradient.rows.const_data_ptr();
  arguments.sources = sources_of(gradient);
  arguments.out = out.mutable_data_ptr();
  arguments.scalar = dispatcher::scalar_of(out);
  arguments.embedding_dim = out.size(1);
  arguments.entries = sorted.entries;
  arguments.starts = sorted.starts;
  arguments.scale = gradient.scale;
  arguments.scale_grad_by_freq = gradient.scale_grad_by_freq;
  return arguments;
}

Tensor dense_on_cpu(const Gradient& gradient) {
  const SortedIds sorted = sorted_ids(gradient);
  const auto [out, is_zero] = dispatcher::empty_table(
      {gradient.num_embeddings, gradient.rows.size(-1)}, gradient.rows.options());
  FillArguments arguments{sum_arguments(gradient, sorted, out), gradient.num_embeddings,
                          sorted.groups};
  if (is_zero) {
    sum_groups(arguments.sum, sorted);
    return out;
  }
  const auto bytes = static_cast<int64_t>(out.nbytes());
  arguments.sum.streaming = bytes >= core::stream_bytes;
  dispatcher::parallel_for(
      gradient.num_embeddings + sorted.kept(),
      bytes / std::max<int64_t>(1, gradient.num_embeddings),
      [&arguments](int64_t begin, int64_t end) { fill_table_cpu(arguments, begin, end); });
  return out;
}

std::tuple<Tensor, Tensor> rows_on_cpu(const Gradient& gradient) {
  const SortedIds sorted = sorted_ids(gradient);
  Tensor row_ids = at::empty({sorted.groups}, at::kLong);
  Tensor rows = dispatcher::empty({sorted.groups, gradient.rows.size(-1)}, gradient.rows.options());
  auto* id = row_ids.mutable_data_ptr<int64_t>();
  for (int64_t group = 0; group < sorted.groups; ++group) id[group] = sorted.row(group);
  SumArguments arguments = sum_arguments(gradient, sorted, rows);
  arguments.dense = false;
  arguments.streaming = static_cast<int64_t>(rows.nbytes()) >= core::stream_bytes;
  sum_groups(arguments, sorted);
  return {row_ids, rows};
}

/// Writes the gradient to `out`. `row_ids` is undefined for the dense form; otherwise it receives
/// the row of each of `out`, and its last element their number.
void differentiate_on_cuda(const Gradient& gradient, const Tensor& out, const Tensor& row_ids) {
  BackwardArguments arguments;
  arguments.gradient = gradient.rows.const_data_ptr();
  arguments.sources = sources_of(gradient);
  arguments.out = out.mutable_data_ptr();
  arguments.scalar = dispatcher::scalar_of(gradient.rows);
  arguments.embedding_dim = gradient.rows.size(-1);
  arguments.ids = dispatcher::index_view(gradient.ids);
  arguments.count = gradient.ids.numel();
  arguments.num_embeddings = gradient.num_embeddings;
  arguments.first_row = first_row(gradient.vocabulary_start);
  arguments.padding_idx = gradient.padding_idx;
  arguments.scale = gradient.scale;
  arguments.scale_grad_by_freq = gradient.scale_grad_by_freq;
  if (row_ids.defined()) {
    arguments.row_ids = row_ids.mutable_data_ptr<int64_t>();
    arguments.groups = arguments.row_ids + arguments.count;
  }
  if constexpr (core::built_with_cuda) {
    const dispatcher::CudaScope scope(gradient.rows);
    arguments.workspace_bytes = backward_workspace_cuda(arguments);
    const Tensor workspace =
        at::empty({arguments.workspace_bytes}, gradient.rows.options().dtype(at::kByte));
    arguments.workspace = workspace.mutable_data_ptr();
    dispatcher::check_launch(backward_cuda(arguments, scope.stream()));
  }
}

std::tuple<Tensor, Tensor> rows_on_cuda(const Gradient& gradient) {
  const int64_t count = gradient.ids.numel(), most = std::min(count, gradient.num_embeddings);
  const auto ids = gradient.ids.options().dtype(at::kLong);
  const Tensor rows = at::empty({most, gradient.rows.size(-1)}, gradient.rows.options());
  if (most == 0) return {at::empty({0}, ids), rows};
  const Tensor row_ids = at::empty({count + 1}, ids);
  differentiate_on_cuda(gradient, rows, row_ids);
  // The result's size depends on data: this is the only place where posembed waits for a device.
  // The sums do not wait for the host.
  const int64_t groups = row_ids[count].item<int64_t>();
  return {row_ids.narrow(0, 0, groups), rows.narrow(0, 0, groups)};
}

Tensor dense_on_cuda(const Gradient& gradient) {
  if (gradient.ids.numel() == 0) {
    return at::zeros({gradient.num_embeddings, gradient.rows.size(-1)}, gradient.rows.options());
  }
  const Tensor out =
      at::empty({gradient.num_embeddings, gradient.rows.size(-1)}, gradient.rows.options());
  differentiate_on_cuda(gradient, out, Tensor());
  return out;
}

/// Calls `make` with contiguous tensors and checked ids.
template <typename Result>
Result gradient_of(const Tensor& gradient, const c10::SymInt& num_embeddings, const Ids& in,
                   Result (*make)(const Gradient&)) {
  const int64_t count = num_embeddings.expect_int();
  const Tensor rows = gradient.contiguous(), ids = in.ids.contiguous();
  if (!dispatcher::on_cuda(gradient) && in.vocabulary_start < 0) check_ids(ids, count);
  return make(
      {rows, ids, count, in.padding_idx, in.scale, in.scale_grad_by_freq, in.vocabulary_start});
}

dispatcher::Unallocated table_shape(const Tensor& gradient, c10::SymInt num_embeddings,
                                    const Ids& in) {
  check_gradient(gradient, num_embeddings, in);
  return {{num_embeddings, gradient.sym_size(-1)}, gradient.options()};
}

Tensor backward(const Tensor& gradient, c10::SymInt num_embeddings, const Ids& in) {
  return gradient_of(gradient, num_embeddings, in, dense_gradient);
}

std::tuple<Tensor, Tensor> backward_rows(const Tensor& gradient, c10::SymInt num_embeddings,
                                         const Ids& in) {
  check_gradient(gradient, num_embeddings, in);
  return gradient_of(gradient, num_embeddings, in, rows_gradient);
}

}  // namespace

Tensor dense_gradient(const Gradient& gradient) {
  return dispatcher::on_cuda(gradient.rows) ? dense_on_cuda(gradient) : dense_on_cpu(gradient);
}

std::tuple<Tensor, Tensor> rows_gradient(const Gradient& gradient) {
  return dispatcher::on_cuda(gradient.rows) ? rows_on_cuda(gradient) : rows_on_cpu(gradient);
}

void check_table_size(const Tensor& ids, const c10::SymInt& num_embeddings,
                      const Tensor& gradient) {
  const auto fits = [](const c10::SymInt& count) {  // a symbolic bound would become a guard
    return count.is_symbolic() || (count >= 0 && count < max_sorted);
  };
  TORCH_CHECK_VALUE(fits(num_embeddings), "num_embeddings: expected 0 to 2^32 - 1, got ",
                    num_embeddings);
  TORCH_CHECK_VALUE(fits(ids.sym_numel()), "ids: expected fewer than 2^32, got ", ids.sym_numel());
  dispatcher::check_result({num_embeddings, gradient.sym_size(-1)}, gradient.scalar_type(),
                           "num_embeddings");
}

void check_gradient_form(Text gradient) {
  TORCH_CHECK_VALUE(gradient == "dense" || gradient == "rows",
                    "gradient: expected 'dense' or 'rows', got '", core::brief(gradient), "'");
}

void check_ids(const Tensor& ids, int64_t num_embeddings) {
  const core::IndexView view = dispatcher::index_view(ids);
  const int64_t index = core::find_outside(view, ids.numel(), 0, num_embeddings);
  TORCH_CHECK_INDEX(index < 0, "ids: expected 0 to ", num_embeddings - 1, ", a row of the token ",
                    "table of ", num_embeddings, ", got ", core::read(view, index), " at index ",
                    index);
}

void gather(const Tensor& weight, const Tensor& ids, const Lookup& lookup, const Tensor& out) {
  const Tensor table = dispatcher::with_contiguous_last_dim(weight);
  GatherArguments arguments;
  arguments.weight = table.const_data_ptr();
  arguments.out = out.mutable_data_ptr();
  arguments.scalar = dispatcher::scalar_of(table);
  arguments.rows = table.size(0);
  arguments.embedding_dim = table.size(1);
  arguments.weight_stride = table.stride(0);
  arguments.ids = dispatcher::index_view(ids);
  arguments.count = ids.numel();
  arguments.first_row = lookup.first_row;
  arguments.scale = lookup.scale;
  arguments.kind = lookup.kind;
  arguments.has_holes = lookup.has_holes;
  if (!lookup.partial) arguments.error = dispatcher::device_error(weight.device());
  dispatcher::launch(arguments, weight, arguments.count,
                     2 * arguments.embedding_dim * core::size_of(arguments.scalar), gather_cpu,
                     POSEMBED_CUDA_LAUNCHER(gather_cuda));
}

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  embedding.implement<empty_rows, gather_rows>(m);
  embedding_backward.implement<table_shape, backward>(m);
  embedding_backward_rows.implement_sized_by_values<backward_rows>(m);
}

}  // namespace posembed::token
