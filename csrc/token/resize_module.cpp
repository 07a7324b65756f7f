// TokenEmbedding with other rows: resize, select and train_rows, each with the optimizer's state.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isin.h>
#include <ATen/ops/unique_dim.h>
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
#include "dispatcher/checks.h"
#include "posembed/token.h"
#include "token/operator.h"

namespace posembed {
namespace {

using torch::Tensor;
using torch::optim::OptimizerParamState;

/// Rows `sources` [rows], or zeros for -1.
Tensor with_rows(const Tensor& state, const Tensor& sources) {
  std::vector<int64_t> row = state.sizes().vec();
  row[0] = 1;
  const Tensor old = at::cat({state, at::zeros(row, state.options())});
  const Tensor rows = sources.to(state.device());
  return old.index_select(0, at::where(rows.lt(0), state.size(0), rows));
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

/// Sets the values and the optimizer's states, whose rows come from rows `sources`, or -1.
void change(const std::vector<Resized>& parts, const Tensor& sources) {
  for (const Resized& part : parts) {
    // The parameter stays the same object: optimizers and tied modules still refer to it.
    part.parameter.set_data(part.values);
    part.parameter.mutable_grad() = Tensor();
    for (Tensor* state : part.states) {
      if (state->defined()) *state = with_rows(*state, sources);
    }
  }
}

void check_head(const torch::nn::LinearImpl& head, const Tensor& table) {
  TORCH_CHECK_VALUE(head.weight.size(0) == table.size(0), "head: expected ", table.size(0),
                    " outputs, one for each row of the table, got ", head.weight.size(0));
}

/// Checks ids of rows: int64 on the CPU.
Tensor checked_rows(const Tensor& rows, int64_t count) {
  dispatcher::check_integers(rows, "rows");
  dispatcher::check_rank(rows, "rows", 1, "[rows]");
  const Tensor ids = rows.to(at::kCPU, at::kLong).contiguous();
  const auto* data = ids.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < ids.numel(); ++i) {
    TORCH_CHECK_INDEX(data[i] >= 0 && data[i] < count, "rows: expected 0 to ", count - 1,
                      ", a row of the table of ", count, ", got ", data[i], " at index ", i);
  }
  return ids;
}

int64_t padded(int64_t num_embeddings, int64_t multiple) {
  TORCH_CHECK_VALUE(multiple >= 1, "pad_to_multiple_of: expected 1 or more, got ", multiple);
  if (num_embeddings <= 0) return num_embeddings;
  return dispatcher::rounded_up(num_embeddings, multiple, "pad_to_multiple_of");
}

/// The parameters of an output layer; its own weight only if the table is not it.
std::vector<Resized> resized_head(torch::nn::LinearImpl& head, const Tensor& table, int64_t rows,
                                  const ResizeOptions& how) {
  check_head(head, table);
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

/// Replaces a parameter of an optimizer, and its states by those of rows `sources`.
void replace(torch::optim::Optimizer& optimizer, const Tensor& old, const Tensor& parameter,
             const std::vector<Tensor*>& states, const Tensor& sources) {
  for (auto& group : optimizer.param_groups()) {
    std::vector<Tensor> each_once;  // the optimizer may hold both
    for (const Tensor& each : group.params()) {
      const Tensor& kept = each.is_same(old) ? parameter : each;
      const auto is_kept = [&](const Tensor& other) { return other.is_same(kept); };
      if (std::none_of(each_once.begin(), each_once.end(), is_kept)) each_once.push_back(kept);
    }
    group.params() = each_once;
  }
  for (Tensor* state : states) {
    if (state->defined()) *state = with_rows(*state, sources);
  }
  auto& all = optimizer.state();
  if (const auto found = all.find(old.unsafeGetTensorImpl()); found != all.end()) {
    auto state = std::move(found->second);
    all.erase(found);
    all[parameter.unsafeGetTensorImpl()] = std::move(state);
  }
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
  check_whole_table();
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
  const int64_t kept = std::min(count, weight.size(0));
  change(parts, at::cat({at::arange(kept), at::full({count - kept}, -1, at::kLong)}));
  options.num_embeddings(count);
  if (how.head() != nullptr) how.head()->options.out_features(count);
}

void TokenEmbeddingImpl::select(const Tensor& rows,
                                const std::shared_ptr<torch::nn::LinearImpl>& head,
                                torch::optim::Optimizer* optimizer) {
  check_whole_table();
  const torch::NoGradGuard no_grad;
  const Tensor sources = checked_rows(rows, weight.size(0));
  std::optional<int64_t> padding;
  if (options.padding_idx().has_value()) {
    const Tensor places = sources.eq(*options.padding_idx()).nonzero();
    TORCH_CHECK_VALUE(places.numel() > 0, "rows: expected padding_idx, ", *options.padding_idx(),
                      ", among them");
    padding = places[0].item<int64_t>();
  }
  std::vector<Tensor> parameters = {weight};
  if (head != nullptr) {
    check_head(*head, weight);
    if (!head->weight.is_same(weight)) parameters.push_back(head->weight);
    if (head->bias.defined()) parameters.push_back(head->bias);
  }
  std::vector<Resized> parts;
  for (const Tensor& parameter : parameters) {
    parts.push_back({parameter, parameter.index_select(0, sources.to(parameter.device())),
                     states_of(optimizer, parameter)});
  }
  change(parts, sources);
  options.num_embeddings(sources.numel()).padding_idx(padding);
  if (head != nullptr) head->options.out_features(sources.numel());
}

void TokenEmbeddingImpl::train_rows(const std::optional<Tensor>& rows,
                                    torch::optim::Optimizer* optimizer) {
  TORCH_CHECK_TYPE(weight.defined(), "weight: expected a table of numbers, got none");
  TORCH_CHECK_VALUE(!options.max_norm().has_value() && !options.scale_grad_by_freq(),
                    "rows: expected none for a table with max_norm or scale_grad_by_freq");
  const torch::NoGradGuard no_grad;
  Tensor ids;  // ascending, each once, without the row that never learns
  if (rows.has_value()) {
    ids = std::get<0>(at::unique_dim(checked_rows(*rows, weight.size(0)), 0));
    if (options.padding_idx().has_value()) ids = ids.index({ids.ne(*options.padding_idx())});
  }
  const Tensor old = trained.defined() ? trained : weight;
  const auto states = states_of(optimizer, old);
  // The row of `old` for each row of the table; then for each row that learns.
  Tensor sources = at::arange(weight.size(0));
  if (trained.defined()) {
    weight.index_copy_(0, trained_rows, trained);
    const Tensor known = trained_rows.cpu();
    sources =
        at::full({weight.size(0)}, -1, at::kLong).index_copy_(0, known, at::arange(known.numel()));
  }
  if (ids.defined()) sources = sources.index_select(0, ids);
  if (trained.defined()) parameters_.erase("trained");
  trained = Tensor();
  weight.set_requires_grad(!ids.defined());
  weight.mutable_grad() = Tensor();
  if (ids.defined()) {
    if (!trained_rows.defined()) {
      trained_rows = register_buffer("trained_rows", at::empty({0}, at::kLong));
    }
    trained_rows.set_data(ids.to(weight.device()));
    trained = register_parameter("trained", weight.index_select(0, trained_rows));
  }
  if (optimizer != nullptr)
    replace(*optimizer, old, trained.defined() ? trained : weight, states, sources);
}

void TokenEmbeddingImpl::freeze_rows(const Tensor& rows, torch::optim::Optimizer* optimizer) {
  TORCH_CHECK_TYPE(weight.defined(), "weight: expected a table of numbers, got none");
  const Tensor frozen = checked_rows(rows, weight.size(0)), all = at::arange(weight.size(0));
  train_rows(all.index({at::isin(all, frozen).logical_not()}), optimizer);
}

void TokenEmbeddingImpl::check_whole_table() const {
  TORCH_CHECK_TYPE(weight.defined(), "weight: expected a table of numbers, got none");
  TORCH_CHECK_VALUE(!trained.defined(), "weight: expected a table whose rows learn together, got ",
                    "one of which ", trained_rows.numel(), " rows learn: call train_rows first");
}

}  // namespace posembed
