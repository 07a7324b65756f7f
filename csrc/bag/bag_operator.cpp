// The bag operators: rows of a table pooled by bags of ids, and the gradients of the table and of
// the weights. The token family's kernels sum gradients by id, given the row for each index.
#include "bag/bag_operator.h"

#include <algorithm>

#include "bag/bag.h"
#include "core/brief.h"
#include "dispatcher/autograd.h"
#include "dispatcher/launch.h"
#include "dispatcher/output_memory.h"
#include "token/token_operator.h"

namespace posembed::bag {
namespace {

// ------------------------------------------------------------------------------------- checks

Mode mode_of(Text mode) { return static_cast<Mode>(dispatcher::enum_from<BagMode>(mode)); }

void check_bag(const Bag& in) {
  dispatcher::check_integers(in.ids, "ids");
  if (!in.offsets.has_value()) {
    TORCH_CHECK_VALUE(in.ids.dim() == 2, "ids: expected [bags, size], or [count] and offsets, got ",
                      in.ids.sym_sizes());
    return;
  }
  TORCH_CHECK_VALUE(in.ids.dim() == 1, "ids: expected [count] beside offsets, got ",
                    in.ids.sym_sizes());
  dispatcher::check_integers(*in.offsets, "offsets");
  dispatcher::check_rank(*in.offsets, "offsets", 1,
                         in.include_last_offset ? "[bags + 1]" : "[bags]");
  TORCH_CHECK_VALUE(!in.include_last_offset || in.offsets->sym_size(0) > 0,
                    "offsets: expected the end of the last bag with include_last_offset, got none");
}

void check_weights(const Bag& in, const MaybeTensor& weights, Text mode, const Tensor& like,
                   const char* name) {
  if (!weights.has_value()) return;
  TORCH_CHECK_VALUE(mode == "sum", "weights: expected none with mode '", core::brief(mode),
                    "'; a weighted mean is a sum of weights that add up to 1");
  dispatcher::check_same_dtype(*weights, "weights", like, name);
  dispatcher::check_same_shape(*weights, "weights", in.ids, "ids");
}

void check_table(const Tensor& weight, const Bag& in) {
  dispatcher::check_floating(weight, "weight");
  dispatcher::check_rank(weight, "weight", 2, "[num_embeddings, embedding_dim]");
  TORCH_CHECK_VALUE(
      in.padding_idx == -1 || (in.padding_idx >= 0 && in.padding_idx < weight.sym_size(0)),
      "padding_idx: expected -1 (none) or a row of the table of ", weight.sym_size(0),
      " rows, got ", in.padding_idx);
  check_bag(in);
}

c10::SymInt bags_of(const Bag& in) {
  return in.offsets.has_value() ? in.offsets->sym_size(0) - int64_t{in.include_last_offset}
                                : in.ids.sym_size(0);
}

void check_gradient(const Tensor& gradient, const Bag& in) {
  dispatcher::check_floating(gradient, "gradient");
  dispatcher::check_rank(gradient, "gradient", 2, "[bags, embedding_dim]");
  check_bag(in);
  dispatcher::check_size(gradient.sym_size(0), bags_of(in), "gradient", "bags");
}

void check_backward(const Tensor& gradient, const Bag& in, const MaybeTensor& weights,
                    const MaybeTensor& maxima, Text mode, const c10::SymInt& num_embeddings) {
  check_gradient(gradient, in);
  token::check_table_size(in.ids, num_embeddings, gradient);
  check_weights(in, weights, mode, gradient, "gradient");
  TORCH_CHECK_VALUE(maxima.has_value() == (mode_of(mode) == Mode::max),
                    "maxima: expected with mode 'max' and no other");
  if (!maxima.has_value()) return;
  TORCH_CHECK_TYPE(maxima->scalar_type() == at::kLong, "maxima: expected int64, got ",
                   dispatcher::dtype_name(maxima->scalar_type()));
  dispatcher::check_same_shape(*maxima, "maxima", gradient, "gradient");
}

// --------------------------------------------------------------------------- kernels' arguments

/// Contiguous ids and offsets, in the form that kernels read. Checks their values on the CPU.
struct Layout {
  Tensor ids, offsets;
  Bags bags;
};

/// Checks that offsets start at 0, do not decrease and stay within the ids.
void check_offsets(const Bags& bags, int64_t count) {
  int64_t before = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t offset = read(bags.offsets, i);
    const bool last = bags.include_last_offset && i == count - 1;
    const bool fits = (i > 0 || last || offset == 0) && offset >= before && offset <= bags.count &&
                      (!last || offset == bags.count);
    TORCH_CHECK_INDEX(fits, "offsets: expected 0, then no less than the offset before, at most ",
                      bags.count, ", the number of ids", last ? ", which the last one must be" : "",
                      ", got ", offset, " at index ", i);
    before = offset;
  }
}

Layout lay_out(const Bag& in, int64_t num_embeddings) {
  Layout layout{in.ids.contiguous(), {}, {}};
  Bags& bags = layout.bags;
  bags.ids = dispatcher::index_view(layout.ids);
  bags.count = in.ids.numel();
  bags.bags = bags_of(in).expect_int();
  bags.padding_idx = in.padding_idx;
  bags.include_last_offset = in.include_last_offset;
  if (in.offsets.has_value()) {
    layout.offsets = in.offsets->contiguous();
    bags.offsets = dispatcher::index_view(layout.offsets);
  } else {
    bags.size = in.ids.size(1);
  }
  if (!dispatcher::on_cuda(in.ids)) {
    token::check_ids(layout.ids, num_embeddings);
    if (in.offsets.has_value()) check_offsets(bags, layout.offsets.numel());
  }
  return layout;
}

// --------------------------------------------------------------------------------------- pool

/// Writes `out` and, for a maximum, `maxima` if it is defined.
void pool(const Tensor& weight, const Bag& in, const MaybeTensor& weights, Mode mode,
          const Tensor& out, const Tensor& maxima) {
  const Layout layout = lay_out(in, weight.size(0));
  const Tensor table = dispatcher::with_contiguous_last_dim(weight);
  const Tensor factors = weights.has_value() ? weights->contiguous() : Tensor();
  PoolArguments arguments;
  arguments.table = table.const_data_ptr();
  arguments.weights = factors.defined() ? factors.const_data_ptr() : nullptr;
  arguments.out = out.mutable_data_ptr();
  arguments.max_indices = maxima.defined() ? maxima.mutable_data_ptr<int64_t>() : nullptr;
  arguments.scalar = dispatcher::scalar_of(weight);
  arguments.mode = mode;
  arguments.rows = table.size(0);
  arguments.embedding_dim = table.size(1);
  arguments.table_stride = table.stride(0);
  arguments.bags = layout.bags;
  arguments.error = dispatcher::device_error(weight.device());
  const int64_t bytes = layout.bags.count * table.size(1) * core::size_of(arguments.scalar);
  dispatcher::launch(arguments, weight, layout.bags.bags,
                     bytes / std::max<int64_t>(1, layout.bags.bags), pool_cpu,
                     POSEMBED_CUDA_LAUNCHER(pool_cuda));
}

void check_pool(const Tensor& weight, const Bag& in, Text mode, const MaybeTensor& weights,
                Text gradient) {
  mode_of(mode);
  check_table(weight, in);
  check_weights(in, weights, mode, weight, "weight");
  token::check_gradient_form(gradient);
}

Tensor empty_bags(const Tensor& weight, const Bag& in, Text mode, const MaybeTensor& weights,
                  Text gradient) {
  check_pool(weight, in, mode, weights, gradient);
  return dispatcher::empty_symint({bags_of(in), weight.sym_size(1)}, weight.options());
}

void fill_bags(const Tensor& weight, const Bag& in, Text mode, const MaybeTensor& weights, Text,
               const Tensor& out) {
  pool(weight, in, weights, mode_of(mode), out, Tensor());
}

std::tuple<Tensor, Tensor> empty_maxima(const Tensor& weight, const Bag& in, Text gradient) {
  check_pool(weight, in, "max", std::nullopt, gradient);
  const c10::SymDimVector sizes = {bags_of(in), weight.sym_size(1)};
  return {dispatcher::empty_symint(sizes, weight.options()),
          dispatcher::empty_symint(sizes, weight.options().dtype(at::kLong))};
}

void fill_maxima(const Tensor& weight, const Bag& in, Text,
                 const std::tuple<Tensor, Tensor>& results) {
  pool(weight, in, std::nullopt, Mode::max, std::get<0>(results), std::get<1>(results));
}

// ------------------------------------------------------------------------- the table's gradient

/// The number of ids in each bag that are not padding: [bags, 1]. Does not wait for a device.
Tensor bag_sizes(const Bag& in) {
  const Tensor kept = in.ids.ne(in.padding_idx);
  if (!in.offsets.has_value()) return kept.sum(1, /*keepdim=*/true);
  const int64_t bags = bags_of(in).expect_int();
  const at::TensorOptions options = in.ids.options().dtype(at::kLong);
  // Wrong offsets on a CUDA device must not cause reads outside the ids.
  const Tensor offsets = in.offsets->to(at::kLong).clamp(0, in.ids.numel());
  const Tensor bounds = at::cat({offsets, at::full({1}, in.ids.numel(), options)});
  const Tensor before = at::cat({at::zeros({1}, options), kept.cumsum(0)});
  const Tensor at_bounds = before.index_select(0, bounds);
  return at::sub(at_bounds.narrow(0, 1, bags), at_bounds.narrow(0, 0, bags)).unsqueeze(1);
}

/// The bag of each id: int32, read as uint32.
Tensor bags_of_ids(const Layout& layout) {
  Tensor out = at::empty({layout.bags.count}, layout.ids.options().dtype(at::kInt));
  const FindArguments arguments{reinterpret_cast<uint32_t*>(out.mutable_data_ptr<int32_t>()),
                                layout.bags};
  dispatcher::launch(arguments, out, layout.bags.count, 2 * core::size_of(core::Scalar::float32),
                     find_bags_cpu, POSEMBED_CUDA_LAUNCHER(find_bags_cuda));
  return out;
}

/// The factor of the gradient for each id's row; undefined if all are 1.
Tensor factors_of(const Tensor& gradient, const Bag& in, const MaybeTensor& weights, Mode mode,
                  const Tensor& bags) {
  const at::ScalarType type = dispatcher::compute_type(gradient);
  if (weights.has_value()) return weights->to(type).contiguous();
  if (mode == Mode::sum) return {};
  return bag_sizes(in).clamp_min(1).view(-1).to(type).reciprocal().index_select(0, bags);
}

/// The part of a maximum's gradient for the row of each id: [ids, embedding_dim].
Tensor spread(const Tensor& gradient, const Tensor& maxima, const Layout& layout) {
  const Tensor from = gradient.contiguous(), chosen = maxima.contiguous();
  Tensor out = dispatcher::empty({layout.bags.count, gradient.size(1)}, gradient.options());
  SpreadArguments arguments;
  arguments.gradient = from.const_data_ptr();
  arguments.max_indices = chosen.const_data_ptr<int64_t>();
  arguments.out = out.mutable_data_ptr();
  arguments.scalar = dispatcher::scalar_of(out);
  arguments.embedding_dim = gradient.size(1);
  arguments.bags = layout.bags;
  dispatcher::launch(arguments, gradient, layout.bags.count,
                     2 * gradient.size(1) * core::size_of(arguments.scalar), spread_cpu,
                     POSEMBED_CUDA_LAUNCHER(spread_cuda));
  return out;
}

/// Calls `make` with the rows that the table's gradient sums: the bags' rows, which their ids
/// share, or for a maximum one row for each id.
template <typename Result>
Result gradient_of(const Tensor& gradient, const c10::SymInt& count, const Bag& in, Text mode_text,
                   const MaybeTensor& weights, const MaybeTensor& maxima,
                   Result (*make)(const token::Gradient&)) {
  const int64_t num_embeddings = count.expect_int();
  const Mode mode = mode_of(mode_text);
  const Layout layout = lay_out(in, num_embeddings);
  const bool shares = mode != Mode::max && layout.bags.bags > 0;  // without bags no id gets any
  const Tensor rows = mode == Mode::max ? spread(gradient, *maxima, layout)
                      : shares
                          ? gradient.contiguous()
                          : at::zeros({layout.bags.count, gradient.size(1)}, gradient.options());
  token::Gradient table_gradient{rows, layout.ids, num_embeddings, in.padding_idx};
  if (shares) {
    table_gradient.sources = bags_of_ids(layout);
    table_gradient.factors = factors_of(gradient, in, weights, mode, table_gradient.sources);
  }
  return make(table_gradient);
}

dispatcher::Unallocated table_shape(const Tensor& gradient, c10::SymInt num_embeddings,
                                    const Bag& in, Text mode, const MaybeTensor& weights,
                                    const MaybeTensor& maxima) {
  check_backward(gradient, in, weights, maxima, mode, num_embeddings);
  return {{num_embeddings, gradient.sym_size(1)}, gradient.options()};
}

Tensor backward(const Tensor& gradient, c10::SymInt num_embeddings, const Bag& in, Text mode,
                const MaybeTensor& weights, const MaybeTensor& maxima) {
  return gradient_of(gradient, num_embeddings, in, mode, weights, maxima, token::dense_gradient);
}

std::tuple<Tensor, Tensor> backward_rows(const Tensor& gradient, c10::SymInt num_embeddings,
                                         const Bag& in, Text mode, const MaybeTensor& weights,
                                         const MaybeTensor& maxima) {
  check_backward(gradient, in, weights, maxima, mode, num_embeddings);
  return gradient_of(gradient, num_embeddings, in, mode, weights, maxima, token::rows_gradient);
}

// ----------------------------------------------------------------------- the weights' gradient

Tensor empty_weights(const Tensor& gradient, const Tensor& weight, const Bag& in) {
  check_table(weight, in);
  check_gradient(gradient, in);
  dispatcher::check_same_dtype(gradient, "gradient", weight, "weight");
  dispatcher::check_size(gradient.sym_size(1), weight.sym_size(1), "gradient", "embedding_dim");
  return dispatcher::empty_symint(in.ids.sym_sizes(), weight.options());
}

void weights_backward(const Tensor& gradient, const Tensor& weight, const Bag& in,
                      const Tensor& out) {
  const Layout layout = lay_out(in, weight.size(0));
  const Tensor from = gradient.contiguous(), table = dispatcher::with_contiguous_last_dim(weight);
  DotArguments arguments;
  arguments.gradient = from.const_data_ptr();
  arguments.table = table.const_data_ptr();
  arguments.out = out.mutable_data_ptr();
  arguments.scalar = dispatcher::scalar_of(weight);
  arguments.rows = table.size(0);
  arguments.embedding_dim = table.size(1);
  arguments.table_stride = table.stride(0);
  arguments.bags = layout.bags;
  dispatcher::launch(arguments, weight, layout.bags.count,
                     2 * table.size(1) * core::size_of(arguments.scalar), dot_cpu,
                     POSEMBED_CUDA_LAUNCHER(dot_cuda));
}

// ---------------------------------------------------------------------------------------- gradient
// Derivatives of the bag operators. A weighted sum is linear in the table and in the weights, so
// the derivatives of the sum and of its two gradients are these three operators again. A maximum
// saves the indices of the elements it took; its derivative selects the elements there.

using dispatcher::FunctionNode;
using dispatcher::Gradients;
using dispatcher::SavedVariable;
using dispatcher::variable_list;

Tensor or_undefined(const MaybeTensor& tensor) { return tensor.value_or(Tensor()); }

MaybeTensor if_defined(const Tensor& tensor) {
  return tensor.defined() ? MaybeTensor(tensor) : std::nullopt;
}

/// The gradient of the table. `form`: "dense", or "rows" for a sparse tensor of the touched rows.
Tensor table_gradient(const Tensor& gradient, const c10::SymInt& rows, const Bag& in, Text mode,
                      const MaybeTensor& weights, const MaybeTensor& maxima, Text form) {
  if (form == "dense") {
    return token_bag_backward(gradient, rows, in, mode, weights, maxima);
  }
  const auto [row_ids, values] = token_bag_backward_rows(gradient, rows, in, mode, weights, maxima);
  return token::sparse_gradient(row_ids, values, rows);
}

/// The elements of `table` that a maximum took. Zeros for empty bags, and for a maximum or an id
/// that does not exist: an out-of-range look-up by torch would destroy the CUDA context.
Tensor choose(const Tensor& table, const Tensor& ids, const Tensor& maxima) {
  if (ids.sym_numel() == 0) return at::zeros_symint(maxima.sym_sizes(), table.options());
  const Tensor none = maxima.lt(0).logical_or(maxima.ge(ids.sym_numel()));
  const Tensor indices = maxima.masked_fill(none, 0).reshape(-1);
  const Tensor rows =
      ids.reshape(-1).index_select(0, indices).to(at::kLong).view_symint(maxima.sym_sizes());
  const Tensor left_out = none.logical_or(rows.lt(0)).logical_or(rows.ge(table.sym_size(0)));
  return at::gather(table, 0, rows.masked_fill(left_out, 0)).masked_fill(left_out, 0);
}

// ------------------------------------------------------------------------------- sum and mean

/// `table` and `weights` are defined if the gradient of the other needs them.
variable_list bag_gradient(const Gradients& gradients, const Bag& in, const Tensor& table,
                           const MaybeTensor& weights, const c10::SymInt& rows, Text mode,
                           Text form) {
  variable_list result(2);
  if (gradients.needs(0)) {
    result[0] = table_gradient(gradients[0], rows, in, mode, weights, std::nullopt, form);
  }
  if (gradients.needs(1)) result[1] = token_bag_weights_backward(gradients[0], table, in);
  return result;
}

/// `tensor` if `other` needs a gradient.
Tensor kept_for(const Tensor& other, const Tensor& tensor) {
  return other.defined() && other.requires_grad() ? tensor : Tensor();
}

bool wants_derivative(const Tensor& tensor) {
  return torch::autograd::compute_requires_grad(tensor) || dispatcher::tangent(tensor).defined();
}

Tensor bag_autograd(const Tensor& weight, const Bag& in, Text mode, const MaybeTensor& weights,
                    Text gradient) {
  if (mode == "max" && !weights.has_value() && wants_derivative(weight)) {
    return std::get<0>(token_bag_max(weight, in, gradient));
  }
  const Tensor factors = or_undefined(weights);
  auto node = dispatcher::node_for<FunctionNode<token_bag, bag_gradient>>(weight, factors);
  if (node) {
    node->save(in, kept_for(factors, weight), if_defined(kept_for(weight, factors)),
               weight.sym_size(0), mode, gradient);
  }
  return dispatcher::bilinear(node, weight, factors,
                              [&](const Tensor& table, const Tensor& scales) {
                                return token_bag(table, in, mode, if_defined(scales), gradient);
                              });
}

// ------------------------------------------------------------------------------------ maximum

variable_list max_gradient(const Gradients& gradients, const Bag& in, const Tensor& maxima,
                           const c10::SymInt& rows, Text form) {
  return {table_gradient(gradients[0], rows, in, "max", std::nullopt, maxima, form)};
}

std::tuple<Tensor, Tensor> max_autograd(const Tensor& weight, const Bag& in, Text gradient) {
  auto node = dispatcher::node_for<FunctionNode<token_bag_max, max_gradient>>(weight);
  std::tuple<Tensor, Tensor> outputs =
      dispatcher::below_autograd([&] { return token_bag_max(weight, in, gradient); });
  auto& [output, maxima] = outputs;
  if (node) {
    node->save(in, maxima, weight.sym_size(0), gradient);
    torch::autograd::set_history(output, node);
  }
  if (const Tensor direction = dispatcher::tangent(weight); direction.defined()) {
    dispatcher::set_tangent(output, choose(direction, in.ids, maxima));
  }
  return outputs;
}

// ------------------------------------------------------------------------- the table's gradient

/// `gradient` and `weights` are defined if the gradient of the other needs them.
variable_list backward_gradient(const Gradients& gradients, const Bag& in, const Tensor& gradient,
                                const MaybeTensor& weights, const MaybeTensor& maxima, Text mode) {
  variable_list result(2);
  const Tensor& table = gradients[0];
  if (gradients.needs(0)) {
    result[0] = maxima.has_value() ? choose(table, in.ids, *maxima)
                                   : token_bag(table, in, mode, weights, "dense");
  }
  if (gradients.needs(1)) result[1] = token_bag_weights_backward(gradient, table, in);
  return result;
}

Tensor backward_autograd(const Tensor& gradient, c10::SymInt num_embeddings, const Bag& in,
                         Text mode, const MaybeTensor& weights, const MaybeTensor& maxima) {
  const Tensor factors = or_undefined(weights);
  using Node = FunctionNode<token_bag_backward, backward_gradient>;
  auto node = dispatcher::node_for<Node>(gradient, factors);
  if (node) {
    node->save(in, kept_for(factors, gradient), if_defined(kept_for(gradient, factors)), maxima,
               mode);
  }
  return dispatcher::bilinear(
      node, gradient, factors, [&](const Tensor& rows, const Tensor& scales) {
        return token_bag_backward(rows, num_embeddings, in, mode, if_defined(scales), maxima);
      });
}

std::tuple<Tensor, Tensor> backward_rows_autograd(const Tensor& gradient,
                                                  c10::SymInt num_embeddings, const Bag& in,
                                                  Text mode, const MaybeTensor& weights,
                                                  const MaybeTensor& maxima) {
  const auto call = [&] {
    return token_bag_backward_rows(gradient, num_embeddings, in, mode, weights, maxima);
  };
  return token::underived_rows<token_bag_backward_rows>(call, gradient, or_undefined(weights));
}

// ----------------------------------------------------------------------- the weights' gradient

variable_list weights_gradient(const Gradients& gradients, const Bag& in, const Tensor& gradient,
                               const Tensor& table) {
  variable_list result(2);
  const Tensor& weights = gradients[0];
  if (gradients.needs(0)) result[0] = token_bag(table, in, "sum", weights, "dense");
  if (gradients.needs(1)) {
    result[1] = token_bag_backward(gradient, table.sym_size(0), in, "sum", weights, std::nullopt);
  }
  return result;
}

Tensor weights_backward_autograd(const Tensor& gradient, const Tensor& weight, const Bag& in) {
  using Node = FunctionNode<token_bag_weights_backward, weights_gradient>;
  auto node = dispatcher::node_for<Node>(gradient, weight);
  if (node) node->save(in, gradient, weight);
  return dispatcher::bilinear(node, gradient, weight, [&](const Tensor& rows, const Tensor& table) {
    return token_bag_weights_backward(rows, table, in);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  const std::string bag =
      "Tensor ids, "
      "Tensor? offsets=None, "
      "int padding_idx=-1, "
      "bool include_last_offset=False";
  define(m, "token_bag(Tensor weight, " + bag +
                ", str mode=\"sum\", Tensor? weights=None, str gradient=\"dense\") -> Tensor");
  define(m,
         "token_bag_max(Tensor weight, " + bag + ", str gradient=\"dense\") -> (Tensor, Tensor)");
  const std::string backward_call = "Tensor gradient, SymInt num_embeddings, " + bag +
                                    ", str mode=\"sum\", Tensor? weights=None, Tensor? maxima=None";
  define(m, "token_bag_backward(" + backward_call + ") -> Tensor");
  define(m, "token_bag_backward_rows(" + backward_call + ") -> (Tensor, Tensor)");
  define(m, "token_bag_weights_backward(Tensor gradient, Tensor weight, " + bag + ") -> Tensor");
  token_bag.implement<empty_bags, fill_bags>(m);
  token_bag_max.implement<empty_maxima, fill_maxima>(m);
  token_bag_backward.implement<table_shape, backward>(m);
  token_bag_backward_rows.implement_sized_by_values<backward_rows>(m);
  token_bag_weights_backward.implement<empty_weights, weights_backward>(m);
  token_bag.differentiate<bag_autograd>(m);
  token_bag_max.differentiate<max_autograd>(m);
  token_bag_backward.differentiate<backward_autograd>(m);
  token_bag_backward_rows.differentiate<backward_rows_autograd>(m);
  token_bag_weights_backward.differentiate<weights_backward_autograd>(m);
}

}  // namespace posembed::bag
