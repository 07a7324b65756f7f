// Derivatives of relative logits, which are linear in the query, in the table and in scores that
// are added. Hidden keys have no derivative.
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "dispatcher/autograd.h"
#include "dispatcher/saved_call.h"
#include "dispatcher/tangent.h"
#include "relative_logits/kernel.h"
#include "relative_logits/operator.h"

namespace posembed::relative_logits {
namespace {

using dispatcher::primal;
using dispatcher::tangent;
using dispatcher::variable_list;

/// Rows of a derivative: hidden keys have 0.
Tensor without_hidden(const Tensor& rows) { return rows.clamp_min(no_row); }

MaybeTensor maybe(const Tensor& tensor) {
  return tensor.defined() ? MaybeTensor(tensor) : std::nullopt;
}

/// What both nodes save.
struct Saved {
  template <typename Visitor>
  void members(Visitor& visit) {
    visit(query);
    visit(table);
    visit(rows);
    options.members(visit);
  }

  void save(const Tensor& given_query, const Tensor& given_table, const Tensor& given_rows,
            const Options& given) {
    query = dispatcher::save(given_query);
    table = dispatcher::save(given_table);
    rows = dispatcher::save(given_rows);
    options.save(given);
  }

  dispatcher::SavedVariable query, table, rows;
  dispatcher::SavedCall<Options> options;
};

class RelativeLogitsBackward : public dispatcher::OperatorNode<RelativeLogitsBackward> {
 public:
  static constexpr const char* label = "RelativeLogitsBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    saved.members(visit);
  }

  variable_list backward(variable_list&& gradients) {
    const Tensor& gradient = gradients[0];
    variable_list result{Tensor(), Tensor(), gradient};
    if (!gradient.defined() || !(needs(0) || needs(1))) return result;
    const auto [of_query, of_table] =
        relative_logits_backward(gradient, saved.query.unpack(), saved.table.unpack(),
                                 saved.rows.unpack(), saved.options.unpack(), needs(0), needs(1));
    if (needs(0)) result[0] = of_query;
    if (needs(1)) result[1] = of_table;
    return result;
  }

  Saved saved;
};

/// Gradient of relative_logits_backward.
class RelativeLogitsBackwardBackward
    : public dispatcher::OperatorNode<RelativeLogitsBackwardBackward> {
 public:
  static constexpr const char* label = "RelativeLogitsBackwardBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    visit(gradient);
    saved.members(visit);
    visit(has_query);
    visit(has_table);
  }

  variable_list backward(variable_list&& gradients) {
    const Tensor of_query = has_query ? gradients[0] : Tensor(),
                 of_table = has_table ? gradients[1] : Tensor();
    variable_list result(3);
    if (!of_query.defined() && !of_table.defined()) return result;
    const Tensor g = gradient.unpack(), query = saved.query.unpack(), table = saved.table.unpack(),
                 rows = saved.rows.unpack();
    const Options options = saved.options.unpack();
    if (needs(0)) {
      Tensor sum;
      if (of_query.defined())
        sum = relative_logits(of_query, table, without_hidden(rows), {}, options);
      if (of_table.defined()) {
        sum = relative_logits(query, of_table, without_hidden(rows), maybe(sum), options);
      }
      result[0] = sum;
    }
    if (needs(1) && of_table.defined()) {
      result[1] =
          std::get<0>(relative_logits_backward(g, query, of_table, rows, options, true, false));
    }
    if (needs(2) && of_query.defined()) {
      result[2] =
          std::get<1>(relative_logits_backward(g, of_query, table, rows, options, false, true));
    }
    return result;
  }

  dispatcher::SavedVariable gradient;
  Saved saved;
  bool has_query = true, has_table = true;  // results that were computed
};

Tensor logits_tangent(const Tensor& query, const Tensor& table, const Tensor& rows,
                      const MaybeTensor& scores, const Options& options) {
  const Tensor of_query = tangent(query), of_table = tangent(table);
  Tensor direction = scores.has_value() ? dispatcher::copied_tangent(*scores) : Tensor();
  if (of_query.defined()) {
    direction =
        relative_logits(of_query, primal(table), without_hidden(rows), maybe(direction), options);
  }
  if (of_table.defined()) {
    direction =
        relative_logits(primal(query), of_table, without_hidden(rows), maybe(direction), options);
  }
  return direction;
}

Tensor logits_autograd(const Tensor& query, const Tensor& table, const Tensor& rows,
                       const MaybeTensor& scores, const Options& options) {
  auto node = dispatcher::node_for<RelativeLogitsBackward>(query, table, scores.value_or(Tensor()));
  if (node) node->saved.save(query, table, rows, options);
  Tensor output = dispatcher::below_autograd(
      [&] { return relative_logits(query, table, rows, scores, options); });
  if (node) torch::autograd::set_history(output, node);
  dispatcher::set_tangent(output, logits_tangent(query, table, rows, scores, options));
  return output;
}

using Two = std::tuple<Tensor, Tensor>;

/// The tangents of both gradients; that of a gradient which is not needed is empty.
void set_backward_tangents(const Tensor& gradient, const Tensor& query, const Tensor& table,
                           const Tensor& rows, const Options& options, const Two& results,
                           bool has_query, bool has_table) {
  Tensor of_query, of_table;
  const auto add = [&](const Tensor& g, const Tensor& q, const Tensor& t, bool first, bool second) {
    if (!first && !second) return;
    const auto [a, b] = relative_logits_backward(g, q, t, rows, options, first, second);
    if (first) of_query = dispatcher::accumulate(of_query, a);
    if (second) of_table = dispatcher::accumulate(of_table, b);
  };
  const Tensor dg = tangent(gradient), dq = tangent(query), dt = tangent(table);
  const Tensor g = primal(gradient), q = primal(query), t = primal(table);
  if (dg.defined()) add(dg, q, t, has_query, has_table);
  if (dq.defined()) add(g, dq, t, false, has_table);
  if (dt.defined()) add(g, q, dt, has_query, false);
  dispatcher::set_tangent(std::get<0>(results), of_query);
  dispatcher::set_tangent(std::get<1>(results), of_table);
}

Two backward_autograd(const Tensor& gradient, const Tensor& query, const Tensor& table,
                      const Tensor& rows, const Options& options, bool query_gradient,
                      bool table_gradient) {
  auto node = dispatcher::node_for<RelativeLogitsBackwardBackward>(gradient, query, table);
  if (node) {
    node->gradient = dispatcher::save(gradient);
    node->saved.save(query, table, rows, options);
    node->has_query = query_gradient;
    node->has_table = table_gradient;
  }
  const Two results = dispatcher::below_autograd([&] {
    return relative_logits_backward(gradient, query, table, rows, options, query_gradient,
                                    table_gradient);
  });
  if (node) {
    torch::autograd::set_history(variable_list{std::get<0>(results), std::get<1>(results)}, node);
  }
  set_backward_tangents(gradient, query, table, rows, options, results, query_gradient,
                        table_gradient);
  return results;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  relative_logits.differentiate<logits_autograd>(m);
  relative_logits_.refuse_gradients(m);
  relative_logits_backward.differentiate<backward_autograd>(m);
}

}  // namespace posembed::relative_logits
