// A table's gradient in the rows form has no derivative: second derivatives need gradient="dense".
#pragma once

#include <tuple>

#include "dispatcher/autograd.h"
#include "dispatcher/tangent.h"

namespace posembed::token {

inline constexpr const char* no_second_derivative =
    "posembed: gradient='rows' has no second derivative; use gradient='dense'";

/// A node that throws when it runs; Derived provides its label.
template <typename Derived>
class RowsNode : public dispatcher::OperatorNode<Derived> {
 public:
  template <typename Visitor>
  void members(Visitor&) {}

  dispatcher::variable_list backward(dispatcher::variable_list&&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, no_second_derivative);
  }
};

/// Calls `function`, which returns row ids and rows, and gives the rows that node.
template <typename Node, typename Function, typename... Inputs>
std::tuple<at::Tensor, at::Tensor> underived_rows(const Function& function,
                                                  const Inputs&... inputs) {
  TORCH_CHECK_NOT_IMPLEMENTED(!(dispatcher::tangent(inputs).defined() || ...),
                              no_second_derivative);
  auto node = dispatcher::node_for<Node>(inputs...);
  std::tuple<at::Tensor, at::Tensor> outputs = dispatcher::below_autograd(function);
  if (node) torch::autograd::set_history(std::get<1>(outputs), node);
  return outputs;
}

}  // namespace posembed::token
