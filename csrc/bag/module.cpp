// TokenBag and functional::token_bag for C++: options and the table kept, the operator called.
#include <torch/nn/init.h>

#include <ostream>
#include <vector>

#include "bag/operator.h"
#include "posembed/bag.h"

namespace posembed {
namespace {

void check(TokenBagOptions& options) {
  TORCH_CHECK_VALUE(options.num_embeddings() >= 0, "num_embeddings: expected 0 or more, got ",
                    options.num_embeddings());
  TORCH_CHECK_VALUE(options.embedding_dim() >= 0, "embedding_dim: expected 0 or more, got ",
                    options.embedding_dim());
  if (const auto padding = options.padding_idx(); padding.has_value()) {
    const int64_t rows = options.num_embeddings();
    TORCH_CHECK_VALUE(*padding >= -rows && *padding < rows, "padding_idx: expected ", -rows, " to ",
                      rows - 1, ", got ", *padding);
    if (*padding < 0) options.padding_idx(*padding + rows);
  }
}

}  // namespace

const char* name(BagMode mode) {
  if (mode == BagMode::sum) return "sum";
  return mode == BagMode::mean ? "mean" : "max";
}

torch::Tensor functional::token_bag(const torch::Tensor& ids, const torch::Tensor& weight,
                                    const std::optional<torch::Tensor>& offsets,
                                    const std::optional<torch::Tensor>& weights,
                                    const BagCall& call) {
  return bag::call_token_bag(weight, {ids, offsets, call.padding_idx, call.include_last_offset},
                             weights, posembed::name(call.mode), posembed::name(call.gradient));
}

TokenBagImpl::TokenBagImpl(TokenBagOptions given) : options(std::move(given)) {
  TokenBagImpl::reset();
}

void TokenBagImpl::reset() {
  check(options);
  // A clone is reset while it still holds the original's table: frozen stays frozen.
  const bool trainable = !weight.defined() || weight.requires_grad();
  const std::vector<int64_t> sizes = {options.num_embeddings(), options.embedding_dim()};
  if (!options._weight().defined()) {
    weight = register_parameter("weight", torch::empty(sizes), trainable);
    reset_parameters();
    return;
  }
  TORCH_CHECK_VALUE(options._weight().sizes() == torch::IntArrayRef(sizes),
                    "_weight: expected shape ", sizes, ", got ", options._weight().sizes());
  weight = register_parameter("weight", options._weight());
  options._weight(torch::Tensor());  // a clone makes its own table
}

void TokenBagImpl::reset_parameters() {
  torch::nn::init::normal_(weight);
  if (options.padding_idx().has_value()) {
    const torch::NoGradGuard no_grad;
    weight[*options.padding_idx()].fill_(0);
  }
}

void TokenBagImpl::pretty_print(std::ostream& stream) const {
  stream << "TokenBag(" << options.num_embeddings() << ", " << options.embedding_dim() << ", mode='"
         << posembed::name(options.mode()) << "'";
  if (options.padding_idx().has_value()) stream << ", padding_idx=" << *options.padding_idx();
  if (options.include_last_offset()) stream << ", include_last_offset=True";
  if (options.gradient() == TableGradient::rows) stream << ", gradient='rows'";
  stream << ")";
}

torch::Tensor TokenBagImpl::forward(const torch::Tensor& ids,
                                    const std::optional<torch::Tensor>& offsets,
                                    const std::optional<torch::Tensor>& weights) {
  return functional::token_bag(ids, weight, offsets, weights,
                               {options.mode(), options.padding_idx().value_or(-1),
                                options.include_last_offset(), options.gradient()});
}

TokenBag TokenBag::from_pretrained(const torch::Tensor& weight, bool freeze,
                                   TokenBagOptions options) {
  TORCH_CHECK_VALUE(weight.dim() == 2, "weight: expected [num_embeddings, embedding_dim], got ",
                    weight.sizes());
  options.num_embeddings(weight.size(0)).embedding_dim(weight.size(1))._weight(weight);
  TokenBag module(std::move(options));
  module->weight.set_requires_grad(!freeze);
  return module;
}

}  // namespace posembed
