// TokenEmbedding::resize: resizes a module's table and its optimizer's state.
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <vector>

#include "posembed/token.h"
#include "token/operator.h"

namespace posembed {
namespace {

using torch::Tensor;
using torch::optim::OptimizerParamState;

/// The remaining rows, then zeros.
Tensor with_rows(const Tensor& state, int64_t rows) {
  const int64_t kept = std::min(rows, state.size(0));
  return at::cat(
      {state.narrow(0, 0, kept), at::zeros({rows - kept, state.size(1)}, state.options())});
}

/// The tensors that an optimizer keeps for each element of a parameter.
std::vector<Tensor*> tensors_of(OptimizerParamState& state) {
  namespace optim = torch::optim;
  if (auto* adam = dynamic_cast<optim::AdamParamState*>(&state)) {
    return {&adam->exp_avg(), &adam->exp_avg_sq(), &adam->max_exp_avg_sq()};
  }
  if (auto* adamw = dynamic_cast<optim::AdamWParamState*>(&state)) {
    return {&adamw->exp_avg(), &adamw->exp_avg_sq(), &adamw->max_exp_avg_sq()};
  }
  if (auto* sgd = dynamic_cast<optim::SGDParamState*>(&state)) return {&sgd->momentum_buffer()};
  if (auto* adagrad = dynamic_cast<optim::AdagradParamState*>(&state)) return {&adagrad->sum()};
  if (auto* rmsprop = dynamic_cast<optim::RMSpropParamState*>(&state)) {
    return {&rmsprop->square_avg(), &rmsprop->momentum_buffer(), &rmsprop->grad_avg()};
  }
  C10_THROW_ERROR(ValueError, "optimizer: expected Adam, AdamW, SGD, Adagrad or RMSprop");
}

bool holds(torch::optim::Optimizer& optimizer, const Tensor& parameter) {
  for (const auto& group : optimizer.param_groups()) {
    for (const Tensor& other : group.params()) {
      if (other.is_same(parameter)) return true;
    }
  }
  return false;
}

/// The state that `optimizer` has for `parameter`; none before its first step.
std::vector<Tensor*> states_of(torch::optim::Optimizer* optimizer, const Tensor& parameter) {
  if (optimizer == nullptr) return {};
  TORCH_CHECK_VALUE(holds(*optimizer, parameter),
                    "optimizer: expected one that holds the table, got one that does not");
  const auto state = optimizer->state().find(parameter.unsafeGetTensorImpl());
  if (state == optimizer->state().end()) return {};
  return tensors_of(*state->second);
}

}  // namespace

const char* name(Initialization initialization) {
  switch (initialization) {
    case Initialization::mean_and_covariance:
      return "mean-and-covariance";
    case Initialization::normal:
      return "normal";
    default:
      return "mean";
  }
}

void TokenEmbeddingImpl::resize(int64_t num_embeddings, const ResizeOptions& how,
                                torch::optim::Optimizer* optimizer) {
  TORCH_CHECK_TYPE(weight.defined(), "weight: expected a table of numbers, got none");
  const torch::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(options.padding_idx().value_or(-1) < num_embeddings,
                    "num_embeddings: expected more than padding_idx, ",
                    options.padding_idx().value_or(-1), ", got ", num_embeddings);
  const std::vector<Tensor*> states = states_of(optimizer, weight);
  const auto rows = how.rows().defined() ? std::optional<Tensor>(how.rows()) : std::nullopt;
  // The parameter stays the same object, so that optimizers and tied modules still refer to it.
  weight.set_data(token::embedding_resize(weight, num_embeddings, rows,
                                          posembed::name(how.initialization()),
                                          how.covariance_scale(), how.generator()));
  weight.mutable_grad() = Tensor();
  options.num_embeddings(num_embeddings);
  for (Tensor* state : states) {
    if (state->defined()) *state = with_rows(*state, num_embeddings);
  }
}

}  // namespace posembed
