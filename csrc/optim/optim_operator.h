// The operator of an optimizer's step on rows of a table, as C++ code calls it and as its kernels
// are registered.
#pragma once

#include "dispatcher/operator.h"
#include "posembed/optim.h"

namespace posembed::dispatcher {

template <>
struct EnumArgument<StepRule> {
  static constexpr const char* argument = "rule";
  static constexpr const char* names[] = {"sgd", "rowwise_adagrad", "rowwise_adam", "adam"};
};

template <>
struct EnumArgument<StepRounding> {
  static constexpr const char* argument = "rounding";
  static constexpr const char* names[] = {"nearest", "stochastic", "remainder"};
};

}  // namespace posembed::dispatcher

namespace posembed::optim {

using at::Tensor;

/// Arguments of step_rows_, in the order of its schema.
struct Call {
  Tensor weight;    // [rows, dim]
  Tensor gradient;  // [count, dim]: weight's dtype, or float32 for bfloat16
  RowStep step;

  POSEMBED_FIELDS(self.weight, self.gradient, self.step.rule(), self.step.lr(), self.step.step(),
                  self.step.ids(), self.step.first(), self.step.second(), self.step.owed(),
                  self.step.remainder(), self.step.first_decay(), self.step.second_decay(),
                  self.step.eps(), self.step.weight_decay(), self.step.gradient_scale(),
                  self.step.rounding(), self.step.seed(), self.step.first_row())
};

inline const dispatcher::Operator<void(), Call> step_rows_{"step_rows_"};

}  // namespace posembed::optim
