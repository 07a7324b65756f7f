// The C++ call, through the dispatcher as in Python. An optimizer's step is not differentiated.
#include <ATen/core/grad_mode.h>

#include "optim/optim_operator.h"

namespace posembed {

const char* name(StepRule rule) {
  switch (rule) {
    case StepRule::rowwise_adagrad:
      return "rowwise_adagrad";
    case StepRule::rowwise_adam:
      return "rowwise_adam";
    case StepRule::adam:
      return "adam";
    default:
      return "sgd";
  }
}

const char* name(StepRounding rounding) {
  if (rounding == StepRounding::stochastic) return "stochastic";
  return rounding == StepRounding::remainder ? "remainder" : "nearest";
}

torch::Tensor functional::step_rows_(const torch::Tensor& weight, const torch::Tensor& gradient,
                                     const RowStep& step) {
  const at::NoGradGuard no_grad;
  optim::step_rows_({weight, gradient, step});
  return weight;
}

}  // namespace posembed
