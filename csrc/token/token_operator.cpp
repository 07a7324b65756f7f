// The token operators: look-up, and the table's gradient, dense or as the rows that were touched.
// The gradient sorts ids instead of scattering with atomics, so any number of threads gives the
// same bits.
#include "token/token_operator.h"

#include <algorithm>

#include "core/brief.h"
#include "core/index.h"
#include "core/memory.h"
#include "dispatcher/autograd.h"
#include "dispatcher/launch.h"
#include "dispatcher/output_memory.h"
#include "token/token.h"

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
  return dispatcher::empty_symint(dispatcher::sizes_and(in.ids, weight.sym_size(1)),
                                  weight.options());
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

void check_gradient_form(Text gradient) { dispatcher::enum_from<TableGradient>(gradient); }

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

// -------------------------------------------------------------------------------------- sorted ids

SortedIds sort_ids(const at::Tensor& ids, int64_t num_embeddings, int64_t padding_idx,
                   int64_t first_row) {
  const int64_t count = ids.numel();
  SortedIds sorted;
  sorted.words = at::empty({2 * count}, at::kLong);
  sorted.counts = at::empty({count + 1}, at::kLong);
  sorted.entries = reinterpret_cast<uint64_t*>(sorted.words.mutable_data_ptr<int64_t>());
  sorted.starts = sorted.counts.mutable_data_ptr<int64_t>();
  GroupArguments arguments;
  arguments.ids = dispatcher::index_view(ids);
  arguments.count = count;
  arguments.num_embeddings = num_embeddings;
  arguments.first_row = first_row;
  arguments.padding_idx = padding_idx;
  arguments.entries = sorted.entries;
  arguments.scratch = sorted.entries + count;
  arguments.starts = sorted.starts;
  arguments.groups = &sorted.groups;
  group_cpu(arguments);
  return sorted;
}

/// Divides entries, not groups, among threads, because some ids are far more frequent than others.
void sum_groups(const SumArguments& arguments, const SortedIds& sorted) {
  const int64_t row_bytes = arguments.embedding_dim * core::size_of(arguments.scalar);
  dispatcher::parallel_for(sorted.kept(), 2 * row_bytes, [&](int64_t begin, int64_t end) {
    sum_groups_cpu(arguments, sorted.group_at(begin), sorted.group_at(end));
  });
}

namespace {

// ------------------------------------------------------------------------------------- row targets

int64_t count_single(const SortedIds& sorted) {
  int64_t count = 0;
  for (int64_t group = 0; group < sorted.groups; ++group) {
    count += sorted.starts[group + 1] - sorted.starts[group] == 1;
  }
  return count;
}

/// Rows of a contiguous tensor.
struct TensorRows {
  char* data;
  int64_t bytes;

  explicit TensorRows(const at::Tensor& tensor)
      : data(static_cast<char*>(tensor.mutable_data_ptr())),
        bytes(tensor.size(1) * tensor.element_size()) {}
  void* row(int64_t number) const { return data + number * bytes; }
};

/// Assigns a target to each token, and drops the groups of one entry from `sums`.
void share_rows(RowTargets& destinations) {
  const TensorRows rows(destinations.rows), repeated(destinations.repeated);
  auto& [words, counts, entries, starts, groups] = destinations.sums;
  auto* id = destinations.row_ids.mutable_data_ptr<int64_t>();
  int64_t sums = 0, next = 0;
  for (int64_t group = 0, begin = 0; group < groups; ++group) {
    const int64_t end = starts[group + 1];
    id[group] = static_cast<int64_t>(entries[begin] >> 32);
    if (end - begin == 1) {
      destinations.targets[static_cast<uint32_t>(entries[begin])] = rows.row(group);
    } else {
      starts[sums++] = next;
      for (int64_t entry = begin; entry < end; ++entry, ++next) {
        destinations.targets[static_cast<uint32_t>(entries[entry])] = repeated.row(next);
        entries[next] = static_cast<uint64_t>(group) << 32 | static_cast<uint64_t>(next);
      }
    }
    begin = end;
  }
  starts[sums] = next;
  groups = sums;
}

}  // namespace

RowTargets row_targets(const at::Tensor& table, const at::Tensor& ids, int64_t padding_idx) {
  RowTargets result;
  result.sums = sort_ids(ids, table.size(0), padding_idx);
  const int64_t dim = table.size(1), touched = result.sums.groups;
  result.row_ids = at::empty({touched}, at::kLong);
  result.rows = dispatcher::empty({touched, dim}, table.options());
  result.repeated =
      dispatcher::empty({result.sums.kept() - count_single(result.sums), dim}, table.options());
  result.targets.resize(static_cast<size_t>(ids.numel()));
  share_rows(result);
  return result;
}

void sum_repeated(const RowTargets& destinations) {
  SumArguments arguments;
  arguments.gradient = destinations.repeated.const_data_ptr();
  arguments.out = destinations.rows.mutable_data_ptr();
  arguments.streaming = static_cast<int64_t>(destinations.rows.nbytes()) >= core::stream_bytes;
  arguments.scalar = dispatcher::scalar_of(destinations.rows);
  arguments.embedding_dim = destinations.rows.size(1);
  arguments.entries = destinations.sums.entries;
  arguments.starts = destinations.sums.starts;
  sum_groups(arguments, destinations.sums);
}

namespace {

// ---------------------------------------------------------------------------------------- features
// Rows of a table, and in some places rows of other features: those of images among the tokens of a
// text. Two gathers write one result, so every row is written once.

/// The row of features for each id: int64 [...], -1 for those that have a row of the table.
Tensor feature_rows(const Tensor& places) {
  if (places.scalar_type() != at::kBool) return places.to(at::kLong);
  const Tensor order = places.reshape({-1}).cumsum(0).view_symint(places.sym_sizes()) - 1;
  return at::where(places, order, -1);
}

Tensor empty_rows_and_features(const Tensor& weight, const Tensor& features, const Places& in,
                               Text gradient) {
  dispatcher::check_floating(weight, "weight");
  dispatcher::check_rank(weight, "weight", 2, "[num_embeddings, embedding_dim]");
  dispatcher::check_same_dtype(features, "features", weight, "weight");
  dispatcher::check_rank(features, "features", 2, "[features, embedding_dim]");
  dispatcher::check_size(features.sym_size(1), weight.sym_size(1), "features", "embedding_dim");
  dispatcher::check_integers(in.ids, "ids");
  if (in.places.scalar_type() != at::kBool) dispatcher::check_integers(in.places, "places");
  dispatcher::check_same_shape(in.places, "places", in.ids, "ids");
  TORCH_CHECK_VALUE(in.padding_idx >= -1 && in.padding_idx < weight.sym_size(0),
                    "padding_idx: expected -1 (none) or a row of the table of ", weight.sym_size(0),
                    " rows, got ", in.padding_idx);
  check_gradient_form(gradient);
  return dispatcher::empty_symint(dispatcher::sizes_and(in.ids, weight.sym_size(1)),
                                  weight.options());
}

/// Throws c10::IndexError for the first index on the CPU that is neither a row nor a hole.
void check_rows(const Tensor& indices, int64_t rows, const char* expected) {
  const auto* data = indices.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < indices.numel(); ++i) {
    TORCH_CHECK_INDEX((data[i] >= 0 && data[i] < rows) || data[i] == hole, expected, rows - 1,
                      ", got ", data[i], " at index ", i);
  }
}

/// `rows` where a mask has as many places as there are features. A device's number cannot be read
/// here: other rows are then outside the features, which its kernel records.
Tensor counted(const Tensor& rows, const Tensor& mask, int64_t features) {
  const Tensor count = mask.sum();
  if (dispatcher::on_cuda(mask))
    return at::where(mask.logical_and(count.ne(features)), features, rows);
  TORCH_CHECK_VALUE(count.item<int64_t>() == features, "features: expected ", count.item<int64_t>(),
                    ", one for each place of the mask, got ", features);
  return rows;
}

void gather_both(const Tensor& weight, const Tensor& features, const Places& in, Text,
                 const Tensor& out) {
  Tensor rows = feature_rows(in.places);
  if (in.places.scalar_type() == at::kBool) rows = counted(rows, in.places, features.size(0));
  const Tensor is_own = rows.eq(-1);
  // What the caller passes is no hole: the row would not be written.
  const Tensor given = in.ids.to(at::kLong).clamp_min(hole + 1);
  const Tensor ids = at::where(is_own, given, hole).contiguous();
  rows = rows.clamp_min(hole + 1).masked_fill(is_own, hole).contiguous();
  if (!dispatcher::on_cuda(ids)) {
    check_rows(ids, weight.size(0), "ids: expected a row of the token table, 0 to ");
    check_rows(rows, features.size(0), "places: expected -1 or a row of the features, 0 to ");
  }
  Lookup lookup{0, in.scale};
  lookup.has_holes = true;
  gather(weight, ids, lookup, out);
  gather(features, rows, {0, 1.0, core::ErrorKind::slot, false, true}, out);
}

dispatcher::variable_list features_gradient(const dispatcher::Gradients& gradients,
                                            const Places& in, const c10::SymInt& num_embeddings,
                                            const c10::SymInt& num_features, Text form) {
  dispatcher::variable_list found(2);
  const Tensor rows = feature_rows(in.places);
  // As in a part of a vocabulary, -1 is no row.
  constexpr int64_t start = 0;
  if (gradients.needs(0)) {
    const Tensor ids = at::where(rows.eq(-1), in.ids.to(at::kLong), -1);
    found[0] = table_gradient(gradients[0], num_embeddings,
                              {ids, in.padding_idx, in.scale, false, start}, form);
  }
  if (gradients.needs(1)) {
    found[1] = embedding_backward(gradients[0], num_features, {rows, -1, 1.0, false, start});
  }
  return found;
}

Tensor features_autograd(const Tensor& weight, const Tensor& features, const Places& in,
                         Text gradient) {
  using Node = dispatcher::FunctionNode<embedding_with_features, features_gradient>;
  auto node = dispatcher::node_for<Node>(weight, features);
  if (node) node->save(in, weight.sym_size(0), features.sym_size(0), gradient);
  const auto call = [&](const Tensor& table, const Tensor& others) {
    return embedding_with_features(table, others, in, gradient);
  };
  Tensor output = dispatcher::recorded(node, [&] { return call(weight, features); });
  // Linear in both together.
  const Tensor of_weight = dispatcher::tangent(weight), of_features = dispatcher::tangent(features);
  if (of_weight.defined() || of_features.defined()) {
    const auto or_zeros = [](const Tensor& direction, const Tensor& primal) {
      return direction.defined() ? direction : at::zeros_like(dispatcher::primal(primal));
    };
    dispatcher::set_tangent(output,
                            call(or_zeros(of_weight, weight), or_zeros(of_features, features)));
  }
  return output;
}

}  // namespace

Tensor places_in(const Tensor& rows, const Tensor& ids) {
  const Tensor wanted = ids.to(at::kLong);
  if (rows.numel() == 0) return at::full_like(wanted, -1);
  const Tensor found = at::searchsorted(rows, wanted).clamp_max(rows.numel() - 1);
  return at::where(rows.index({found}).eq(wanted), found, -1);
}

namespace {

// ---------------------------------------------------------------------------------------- gradient
// Derivatives of the token operators. Look-up and summing of rows are each other's transpose, so
// each is the other's gradient, and only ids are saved.

Tensor embedding_transpose(const Tensor& gradient, const dispatcher::Shape& table, const Ids& ids,
                           Text form) {
  return table_gradient(gradient, table.sizes[0], ids, form);
}

/// The count of each id among the ids: [..., 1], in a dtype that can hold it. 1 for ids outside the
/// table, whose rows are zeros.
Tensor counts(const Ids& in, const c10::SymInt& num_embeddings, const Tensor& like) {
  const Tensor ones = at::ones_symint(dispatcher::sizes_and(in.ids, 1),
                                      like.options().dtype(dispatcher::compute_type(like)));
  Ids plain{in.ids};
  plain.vocabulary_start = in.vocabulary_start;
  return look_up(embedding_backward(ones, num_embeddings, plain), plain).clamp_min(1);
}

/// A look-up of the rows that embedding_backward summed into.
Tensor backward_transpose(const Tensor& table, const dispatcher::Shape&, const c10::SymInt&,
                          const Ids& in) {
  Ids plain = in;
  plain.padding_idx = -1;
  plain.scale_grad_by_freq = false;
  Tensor rows = look_up(table, plain);
  if (in.padding_idx >= 0) rows = rows.masked_fill(in.ids.eq(in.padding_idx).unsqueeze(-1), 0);
  if (in.scale_grad_by_freq) {
    rows = at::div(rows, counts(in, table.sym_size(0), table)).to(table.scalar_type());
  }
  return rows;
}

std::tuple<Tensor, Tensor> backward_rows_autograd(const Tensor& gradient,
                                                  c10::SymInt num_embeddings, const Ids& ids) {
  const auto call = [&] { return embedding_backward_rows(gradient, num_embeddings, ids); };
  return underived_rows<embedding_backward_rows>(call, gradient);
}

}  // namespace

Tensor table_gradient(const Tensor& gradient, const c10::SymInt& num_embeddings, const Ids& ids,
                      Text form) {
  if (form == "dense") return embedding_backward(gradient, num_embeddings, ids);
  const auto [row_ids, rows] = embedding_backward_rows(gradient, num_embeddings, ids);
  return sparse_gradient(row_ids, rows, num_embeddings);
}

Tensor sparse_gradient(const Tensor& row_ids, const Tensor& rows,
                       const c10::SymInt& num_embeddings) {
  return at::_sparse_coo_tensor_unsafe_symint(row_ids.unsqueeze(0), rows,
                                              {num_embeddings, rows.sym_size(-1)},
                                              rows.options().layout(at::kSparse),
                                              /*is_coalesced=*/true);
}

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  const std::string ids =
      "Tensor ids, "
      "int padding_idx=-1, "
      "float scale=1.0, "
      "bool scale_grad_by_freq=False, "
      "int vocabulary_start=-1";
  define(m, "embedding(Tensor weight, " + ids + ", str gradient=\"dense\") -> Tensor");
  const std::string backward_call = "Tensor gradient, SymInt num_embeddings, " + ids;
  define(m, "embedding_backward(" + backward_call + ") -> Tensor");
  define(m, "embedding_backward_rows(" + backward_call + ") -> (Tensor, Tensor)");
  define(m,
         "embedding_with_features("
         "Tensor weight, "
         "Tensor features, "
         "Tensor ids, "
         "Tensor places, "
         "int padding_idx=-1, "
         "float scale=1.0, "
         "str gradient=\"dense\") -> Tensor");
  define(m,
         "embedding_quantized("
         "Tensor codes, "
         "Tensor scales, "
         "Tensor ids, "
         "Tensor? biases=None, "
         "int block_rows=1, "
         "int block_columns=0, "
         "float scale=1.0, "
         "ScalarType? dtype=None) -> Tensor");
  define(m, "file_rows(Tensor ids, int file, float scale=1.0, ScalarType? dtype=None) -> Tensor");
  define(m, "quantize_rows(Tensor weight, str format, int block=0) -> (Tensor, Tensor, Tensor)");
  define(m,
         "embedding_resize("
         "Tensor weight, "
         "int num_embeddings, "
         "Tensor? rows=None, "
         "str initialization=\"mean\", "
         "float covariance_scale=1e-9, "
         "Generator? generator=None) -> Tensor");
  embedding.implement<empty_rows, gather_rows>(m);
  embedding_backward.implement<table_shape, backward>(m);
  embedding_backward_rows.implement_sized_by_values<backward_rows>(m);
  embedding_with_features.implement<empty_rows_and_features, gather_both>(m);
  embedding_with_features.differentiate<features_autograd>(m);
  dispatcher::differentiate_linear<embedding, embedding_transpose>(m);
  dispatcher::differentiate_linear<embedding_backward, backward_transpose>(m);
  embedding_backward_rows.differentiate<backward_rows_autograd>(m);
}

}  // namespace posembed::token
