// The C++ call, through the dispatcher as in Python. An optimizer's step is not differentiated.

#include "optim/optim_operator.h"

namespace posembed {

const char* name(StepRule rule) { return dispatcher::name_of(rule); }

const char* name(StepRounding rounding) { return dispatcher::name_of(rounding); }

torch::Tensor functional::step_rows_(const torch::Tensor& weight, const torch::Tensor& gradient,
                                     const RowStep& step) {
  const at::NoGradGuard no_grad;
  optim::step_rows_({weight, gradient, step});
  return weight;
}

}  // namespace posembed
