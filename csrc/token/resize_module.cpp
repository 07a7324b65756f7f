// TokenEmbedding::resize: resizes a module's table and its optimizer's state.
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <vector>

#include "dispatcher/checked.h"
#include "posembed/token.h"
#include "token/operator.h"

namespace posembed {
namespace {

using torch::Tensor;
using torch::optim::OptimizerParamState;

/// The remaining rows, then zeros.
Tensor with_rows(const Tensor& state, int64_t rows) {
  const int64_t kept = std::min(rows, state.size(0));
  std::vector<int64_t> rest = state.sizes().vec();
  rest[0] = rows - kept;
  return at::cat({state.narrow(0, 0, kept), at::zeros(rest, state.options())});
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

/// A parameter, its resized values, and what an optimizer keeps for it.
struct Resized {
  Tensor parameter, values;
  std::vector<Tensor*> states;
};

int64_t padded(int64_t num_embeddings, int64_t multiple) {
  TORCH_CHECK_VALUE(multiple >= 1, "pad_to_multiple_of: expected 1 or more, got ", multiple);
  if (num_embeddings <= 0) return num_embeddings;
  return dispatcher::rounded_up(num_embeddings, multiple, "pad_to_multiple_of");
}

/// The parameters of an output layer; its own weight only if the table is not it.
std::vector<Resized> resized_head(torch::nn::LinearImpl& head, const Tensor& table, int64_t rows,
                                  const ResizeOptions& how) {
  TORCH_CHECK_VALUE(head.weight.size(0) == table.size(0), "head: expected ", table.size(0),
                    " outputs, one for each row of the table, got ", head.weight.size(0));
  const char* initialization = how.rows().defined() ? "mean" : name(how.initialization());
  std::vector<Resized> found;
  if (!head.weight.is_same(table)) {
    found.push_back({head.weight,
                     token::embedding_resize(head.weight, rows, std::nullopt, initialization,
                                             how.covariance_scale(), how.generator()),
                     {}});
  }
  if (head.bias.defined()) {
    const Tensor column = token::embedding_resize(head.bias.unsqueeze(1), rows, std::nullopt,
                                                  "mean", how.covariance_scale(), std::nullopt);
    found.push_back({head.bias, column.squeeze(1), {}});
  }
  return found;
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
  const int64_t count = padded(num_embeddings, how.pad_to_multiple_of());
  TORCH_CHECK_VALUE(options.padding_idx().value_or(-1) < count,
                    "num_embeddings: expected more than padding_idx, ",
                    options.padding_idx().value_or(-1), ", got ", count);
  const auto rows = how.rows().defined() ? std::optional<Tensor>(how.rows()) : std::nullopt;
  std::vector<Resized> parts;
  if (how.head() != nullptr) parts = resized_head(*how.head(), weight, count, how);
  const Tensor table =
      token::embedding_resize(weight, count, rows, posembed::name(how.initialization()),
                              how.covariance_scale(), how.generator());
  parts.push_back({weight, table, {}});
  for (Resized& part : parts) part.states = states_of(optimizer, part.parameter);
  for (const Resized& part : parts) {
    // The parameter stays the same object: optimizers and tied modules still refer to it.
    part.parameter.set_data(part.values);
    part.parameter.mutable_grad() = Tensor();
    for (Tensor* state : part.states) {
      if (state->defined()) *state = with_rows(*state, count);
    }
  }
  options.num_embeddings(count);
  if (how.head() != nullptr) how.head()->options.out_features(count);
}

}  // namespace posembed
