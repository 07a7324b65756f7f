// TokenEmbedding and functional::embedding: thin wrappers around the operators.
#include <ATen/autocast_mode.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <ostream>
#include <string>
#include <vector>

#include "core/brief.h"
#include "dispatcher/launch.h"
#include "dispatcher/output_memory.h"
#include "posembed/token.h"
#include "pretrained/source.h"
#include "token/token_operator.h"

namespace posembed {
namespace {

void check(TokenOptions& options) {
  token::check_table_options(options);
  TORCH_CHECK_VALUE(std::isfinite(options.scale()), "scale: expected a finite number, got ",
                    options.scale());
  TORCH_CHECK_VALUE(
      !options.sparse() || !options.gradient().by_caller() ||
          options.gradient() == TableGradient::rows,
      "gradient: expected 'rows' with sparse=True, which means the same, got 'dense'");
  if (options.sparse()) options.gradient(TableGradient::rows);
  options.sparse(options.gradient() == TableGradient::rows);
}

/// Ids [count] in which another given id, or the first row if there is none, replaces each id
/// outside the table, because a CUDA call cannot reject them. One-dimensional, as torch needs it to
/// find equal ids on CUDA.
torch::Tensor within(const torch::Tensor& ids, int64_t rows) {
  const torch::Tensor flat = ids.reshape(-1);
  if (!dispatcher::on_cuda(flat) || flat.numel() == 0) return flat;
  const torch::Tensor valid = flat.ge(0).logical_and(flat.lt(rows));
  return at::where(valid, flat, (flat * valid).amax());
}

}  // namespace

const char* name(TableGradient gradient) { return dispatcher::name_of(gradient); }

torch::Tensor functional::embedding(const torch::Tensor& ids, const torch::Tensor& weight,
                                    const EmbeddingCall& call) {
  return token::embedding(weight,
                          {ids, call.padding_idx().value_or(-1), call.scale(),
                           call.scale_grad_by_freq(), call.vocabulary_start().value_or(-1)},
                          posembed::name(call.gradient()));
}

torch::Tensor functional::embedding_with_features(const torch::Tensor& ids,
                                                  const torch::Tensor& weight,
                                                  const torch::Tensor& features,
                                                  const torch::Tensor& places,
                                                  const EmbeddingCall& call) {
  TORCH_CHECK_VALUE(!call.scale_grad_by_freq() && !call.vocabulary_start().has_value(),
                    "call: expected neither scale_grad_by_freq nor vocabulary_start");
  return token::embedding_with_features(
      weight, features, {ids, places, call.padding_idx().value_or(-1), call.scale()},
      posembed::name(call.gradient()));
}

TokenEmbeddingImpl::TokenEmbeddingImpl(TokenOptions options_) : options(std::move(options_)) {
  TokenEmbeddingImpl::reset();
}

void TokenEmbeddingImpl::reset() {
  check(options);
  if (trained_rows.defined()) {  // of a clone
    trained_rows = register_buffer("trained_rows", trained_rows.clone());
  }
  if (trained.defined()) trained = register_parameter("trained", trained.detach().clone());
  if (table.is_empty()) {
    token::reset_table(*this);
  } else {
    table = register_module("table", token::same_codes(table));
  }
}

void TokenEmbeddingImpl::quantize(const std::string& format, int64_t block) {
  TORCH_CHECK_VALUE(!options.max_norm().has_value(), "max_norm: expected none for a frozen table, ",
                    "got ", *options.max_norm());
  TORCH_CHECK_VALUE(!trained.defined(), "weight: expected a frozen table, got one of which ",
                    trained_rows.numel(), " rows learn: call train_rows first");
  table = register_module("table", token::codes_of(*this, format, block));
  parameters_.erase("weight");
  weight = torch::Tensor();
}

int64_t TokenEmbeddingImpl::memory() const { return token::table_bytes(*this); }

void TokenEmbeddingImpl::reset_parameters() { token::reset_table_parameters(*this); }

void TokenEmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << "TokenEmbedding(" << options.num_embeddings() << ", " << options.embedding_dim();
  if (options.padding_idx().has_value()) stream << ", padding_idx=" << *options.padding_idx();
  if (options.max_norm().has_value()) stream << ", max_norm=" << *options.max_norm();
  if (options.norm_type() != 2.0) stream << ", norm_type=" << options.norm_type();
  if (options.scale_grad_by_freq()) stream << ", scale_grad_by_freq=True";
  if (options.scale() != 1.0) stream << ", scale=" << options.scale();
  if (options.gradient() == TableGradient::rows) stream << ", gradient='rows'";
  stream << ")";
}

torch::Tensor TokenEmbeddingImpl::forward(const torch::Tensor& ids) {
  if (!table.is_empty()) return table->forward(ids, options.scale());
  if (trained.defined()) {
    const torch::Tensor learned = options.scale() == 1.0 ? trained : trained * options.scale();
    return token::embedding_with_features(
        weight, learned, {ids, token::places_in(trained_rows, ids), -1, options.scale()}, "dense");
  }
  if (options.max_norm().has_value()) {
    const torch::NoGradGuard no_grad;
    torch::Tensor table = weight.detach();
    // Rejects bad ids before any write.
    functional::embedding(ids, table.narrow(1, 0, std::min<int64_t>(1, table.size(1))));
    const torch::Tensor known = within(ids, table.size(0));
    if (known.numel() > 0) {
      at::embedding_renorm_(table, known, *options.max_norm(), options.norm_type());
    }
  }
  return token::embedding(
      weight,
      {ids, options.padding_idx().value_or(-1), options.scale(), options.scale_grad_by_freq()},
      posembed::name(options.gradient()));
}

torch::Tensor TokenEmbeddingImpl::with_embeddings(const torch::Tensor& ids,
                                                  const torch::Tensor& features,
                                                  const torch::Tensor& mask) {
  const bool autocast = at::autocast::is_autocast_enabled(ids.device().type());
  const auto cast = [&](const torch::Tensor& rows) {
    return autocast ? features.to(rows.scalar_type()) : features;
  };
  TORCH_CHECK_TYPE(mask.scalar_type() == at::kBool, "mask: expected bool, got ",
                   dispatcher::dtype_name(mask.scalar_type()));
  dispatcher::check_same_shape(mask, "mask", ids, "ids");
  if (table.is_empty() && !trained.defined() && !options.max_norm().has_value()) {
    return token::embedding_with_features(
        weight, cast(weight), {ids, mask, options.padding_idx().value_or(-1), options.scale()},
        posembed::name(options.gradient()));
  }
  // Such tables have look-ups of their own, whose rows are a table for the features.
  const torch::Tensor rows = forward(ids.masked_fill(mask, 0)).flatten(0, -2);
  const torch::Tensor own = at::arange(ids.numel(), ids.options().dtype(at::kLong)).view_as(ids);
  return token::embedding_with_features(rows, cast(rows), {own, mask}, "dense");
}

torch::Tensor TokenEmbeddingImpl::logits(const torch::Tensor& hidden) {
  TORCH_CHECK_TYPE(weight.defined(),
                   "weight: expected a table of numbers, got none: ", "table->dequantize() it");
  TORCH_CHECK_VALUE(hidden.dim() > 0 && hidden.size(-1) == weight.size(1),
                    "hidden: expected [..., embedding_dim] with embedding_dim ", weight.size(1),
                    ", got ", hidden.sizes());
  if (!at::autocast::is_autocast_enabled(hidden.device().type())) {
    dispatcher::check_same_dtype(hidden, "hidden", weight, "weight");
  }
  torch::Tensor scores = at::linear(hidden, weight);
  if (!trained.defined()) return scores;
  return scores.index_copy_(-1, trained_rows, at::linear(hidden, trained));
}

TokenEmbedding TokenEmbedding::from_pretrained(const torch::Tensor& weight, bool freeze,
                                               TokenOptions options) {
  return token::over_table<TokenEmbedding>(weight, freeze, std::move(options));
}

TokenEmbedding TokenEmbedding::from_file(const std::string& path,
                                         const std::optional<std::vector<std::string>>& vocabulary,
                                         const pretrained::ReadOptions& read, bool freeze,
                                         TokenOptions options,
                                         const pretrained::OpenOptions& open) {
  const torch::Tensor table = pretrained::table_from_file(path, vocabulary, read, open);
  return from_pretrained(table, freeze, std::move(options));
}

}  // namespace posembed

namespace posembed::token {
namespace {

// ------------------------------------------------------------------------------------------ resize
// Grows or shrinks a vocabulary. Remaining rows keep their bits; new rows start near the old ones,
// so that logits hardly change (Hewitt, "Initializing New Word Embeddings for Pretrained Language
// Models", 2021).

using Generator = std::optional<at::Generator>;

/// The mean row in float32 or wider: [1, embedding_dim].
Tensor mean_of(const Tensor& weight) {
  return at::mean(weight, {0}, /*keepdim=*/true, dispatcher::compute_type(weight));
}

/// Draws from N(mean, scale * covariance) of the rows of `weight`. A combination of the centred
/// rows with normal factors has this distribution. It needs no factorisation, which a singular
/// covariance may not have.
Tensor like_rows(const Tensor& weight, int64_t count, double scale, const Generator& generator) {
  constexpr int64_t at_a_time = 256;  // new rows: their factors need memory for all old rows
  const Tensor mean = mean_of(weight);
  const Tensor centred = at::sub(weight.to(mean.scalar_type()), mean);
  const int64_t rows = weight.size(0);
  std::vector<Tensor> parts;
  for (int64_t done = 0; done < count; done += at_a_time) {
    const int64_t part = std::min(at_a_time, count - done);
    const Tensor factors = at::randn({part, rows}, generator, centred.options());
    parts.push_back(at::addmm(mean, factors, centred, 1, std::sqrt(scale / rows)));
  }
  return at::cat(parts);
}

Tensor new_rows(const Tensor& weight, int64_t count, Text initialization, double covariance_scale,
                const Generator& generator) {
  if (initialization == "normal") {
    return at::empty({count, weight.size(1)}, weight.options()).normal_(0, 1, generator);
  }
  TORCH_CHECK_VALUE(weight.size(0) > 0, "weight: expected rows to take the mean of, got none");
  if (initialization == "mean") return mean_of(weight).expand({count, -1});
  return like_rows(weight, count, covariance_scale, generator);
}

void check(const Tensor& weight, int64_t num_embeddings, const std::optional<Tensor>& rows,
           Text initialization, double covariance_scale) {
  dispatcher::check_floating(weight, "weight");
  dispatcher::check_rank(weight, "weight", 2, "[num_embeddings, embedding_dim]");
  dispatcher::check_at_least(num_embeddings, 0, "num_embeddings");
  dispatcher::check_result({num_embeddings, weight.size(1)}, weight.scalar_type(),
                           "num_embeddings");
  TORCH_CHECK_VALUE(
      initialization == "mean" || initialization == "mean-and-covariance" ||
          initialization == "normal",
      "initialization: expected 'mean', 'mean-and-covariance', 'normal' or new rows, ", "got '",
      core::brief(initialization), "'");
  dispatcher::check_at_least(covariance_scale, 0, "covariance_scale");
  if (!rows.has_value()) return;
  const c10::DimVector expected = {std::max<int64_t>(0, num_embeddings - weight.size(0)),
                                   weight.size(1)};
  TORCH_CHECK_VALUE(rows->sizes() == expected, "initialization: expected new rows of shape ",
                    at::IntArrayRef(expected), ", got ", rows->sizes());
}

Tensor resize(const Tensor& weight, int64_t num_embeddings, const std::optional<Tensor>& rows,
              Text initialization, double covariance_scale, Generator generator) {
  check(weight, num_embeddings, rows, initialization, covariance_scale);
  const int64_t added = num_embeddings - weight.size(0);
  if (added <= 0) return weight.narrow(0, 0, num_embeddings).clone(at::MemoryFormat::Contiguous);
  const Tensor new_part =
      rows.has_value() ? *rows
                       : new_rows(weight, added, initialization, covariance_scale, generator);
  return at::cat({weight, new_part.to(weight.options())});
}

}  // namespace

// Without the rule for devices: new rows may come from another one.
TORCH_LIBRARY_IMPL(posembed, CompositeImplicitAutograd, m) { m.impl("embedding_resize", resize); }

}  // namespace posembed::token

namespace posembed {
namespace {

// ----------------------------------------------------------------------------------- resize module
// TokenEmbedding with other rows: resize, select and train_rows, each with the optimizer's state.

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
  dispatcher::check_at_least(multiple, 1, "pad_to_multiple_of");
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

const char* name(Initialization initialization) { return dispatcher::name_of(initialization); }

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
