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

class RelativeLogitsBackward : public dispatcher::OperatorNode<RelativeLogitsBackward> {
 public:
  static constexpr const char* label = "RelativeLogitsBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    factors.members(visit);
  }

  variable_list backward(variable_list&& gradients) {
    const Tensor& gradient = gradients[0];
    variable_list result{Tensor(), Tensor(), gradient};
    if (!gradient.defined() || !(needs(0) || needs(1))) return result;
    const auto [of_query, of_table] =
        relative_logits_backward(gradient, factors.unpack(), needs(0), needs(1));
    if (needs(0)) result[0] = of_query;
    if (needs(1)) result[1] = of_table;
    return result;
  }

  dispatcher::SavedCall<Factors> factors;
};

/// Gradient of relative_logits_backward.
class RelativeLogitsBackwardBackward
    : public dispatcher::OperatorNode<RelativeLogitsBackwardBackward> {
 public:
  static constexpr const char* label = "RelativeLogitsBackwardBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    visit(gradient);
    factors.members(visit);
    visit(has_query);
    visit(has_table);
  }

  variable_list backward(variable_list&& gradients) {
    const Tensor of_query = has_query ? gradients[0] : Tensor(),
                 of_table = has_table ? gradients[1] : Tensor();
    variable_list result(3);
    const Tensor g = gradient.unpack();
    const Factors given = factors.unpack();
    if (needs(0)) {
      add_derived(result[0], given, of_query, given.table);
      add_derived(result[0], given, given.query, of_table);
    }
    if (needs(1) && of_table.defined()) {
      const Factors changed = with(given, given.query, of_table);
      result[1] = std::get<0>(relative_logits_backward(g, changed, true, false));
    }
    if (needs(2) && of_query.defined()) {
      const Factors changed = with(given, of_query, given.table);
      result[2] = std::get<1>(relative_logits_backward(g, changed, false, true));
    }
    return result;
  }

  dispatcher::SavedVariable gradient;
  dispatcher::SavedCall<Factors> factors;
  bool has_query = true, has_table = true;  // results that were computed
};

Tensor logits_autograd(const Factors& factors, const MaybeTensor& scores) {
  const auto& [query, table, rows, scale, by_key] = factors;
  auto node = dispatcher::node_for<RelativeLogitsBackward>(query, table, scores.value_or(Tensor()));
  if (node) node->factors.save(factors);
  Tensor output = dispatcher::below_autograd([&] { return relative_logits(factors, scores); });
  if (node) torch::autograd::set_history(output, node);
  Tensor direction = scores.has_value() ? dispatcher::copied_tangent(*scores) : Tensor();
  add_derived(direction, factors, tangent(query), primal(table));
  add_derived(direction, factors, primal(query), tangent(table));
  dispatcher::set_tangent(output, direction);
  return output;
}

using Two = std::tuple<Tensor, Tensor>;

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
  auto node =
      dispatcher::node_for<RelativeLogitsBackwardBackward>(gradient, factors.query, factors.table);
  if (node) {
    node->gradient = dispatcher::save(gradient);
    node->factors.save(factors);
    node->has_query = query_gradient;
    node->has_table = table_gradient;
  }
  const Two results = dispatcher::below_autograd(
      [&] { return relative_logits_backward(gradient, factors, query_gradient, table_gradient); });
  if (node) {
    torch::autograd::set_history(variable_list{std::get<0>(results), std::get<1>(results)}, node);
  }
  set_backward_tangents(gradient, factors, results, query_gradient, table_gradient);
  return results;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  relative_logits.differentiate<logits_autograd>(m);
  relative_logits_.refuse_gradients(m);
  relative_logits_backward.differentiate<backward_autograd>(m);
}

}  // namespace posembed::relative_logits
