// Shared by modules with a table of tokens: checks of options, and the table as a parameter.
#pragma once

#include <torch/nn/init.h>
#include <torch/types.h>

#include <string>
#include <utility>
#include <vector>

#include "dispatcher/checks.h"
#include "posembed/memory.h"
#include "posembed/quantized.h"

namespace posembed::token {

/// Throws c10::ValueError for bad sizes or padding_idx; converts a negative padding_idx to an index
/// from the start.
template <typename Options>
void check_table_options(Options& options) {
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

/// The codes of module.weight.
template <typename Module>
QuantizedTable codes_of(const Module& module, const std::string& format, int64_t block) {
  TORCH_CHECK_VALUE(module.weight.defined(), "weight: expected a table of numbers, got none");
  return QuantizedTable(functional::quantize_rows(module.weight, format, block),
                        module.weight.scalar_type());
}

/// A table over the same codes. A clone that is reset has the original's, which must stay as it is.
inline QuantizedTable same_codes(const QuantizedTable& table) {
  return QuantizedTable(table->rows, table->dtype);
}

/// The bytes of a module's table.
template <typename Module>
int64_t table_bytes(const Module& module) {
  return module.weight.defined() ? static_cast<int64_t>(module.weight.nbytes())
                                 : module.table->rows.memory();
}

/// Registers module.weight: the table of the options, or a new one with its initial values.
template <typename Module>
void reset_table(Module& module) {
  auto& options = module.options;
  // A clone is reset while it still has the original's table, so a frozen table stays frozen.
  const bool trainable = !module.weight.defined() || module.weight.requires_grad();
  const std::vector<int64_t> sizes = {options.num_embeddings(), options.embedding_dim()};
  if (!options._weight().defined()) {
    module.weight = module.register_parameter("weight", torch::empty(sizes), trainable);
    module.reset_parameters();
    return;
  }
  TORCH_CHECK_VALUE(options._weight().sizes() == torch::IntArrayRef(sizes),
                    "_weight: expected shape ", torch::IntArrayRef(sizes), ", got ",
                    options._weight().sizes());
  module.weight = module.register_parameter("weight", options._weight());
  options._weight(torch::Tensor());  // so that a clone makes its own table
}

/// Fills the table from N(0, 1), and the row of padding_idx with zeros.
template <typename Module>
void reset_table_parameters(Module& module) {
  prefer_huge_pages(module.weight);
  torch::nn::init::normal_(module.weight);
  if (const auto padding = module.options.padding_idx(); padding.has_value()) {
    const torch::NoGradGuard no_grad;
    module.weight[*padding].fill_(0);
  }
}

/// A module that shares `weight`.
template <typename Holder, typename Options>
Holder over_table(const torch::Tensor& weight, bool freeze, Options options) {
  TORCH_CHECK_VALUE(weight.dim() == 2, "weight: expected [num_embeddings, embedding_dim], got ",
                    weight.sizes());
  dispatcher::check_floating(weight, "weight");
  options.num_embeddings(weight.size(0)).embedding_dim(weight.size(1))._weight(weight);
  Holder module(std::move(options));
  module->weight.set_requires_grad(!freeze);
  return module;
}

}  // namespace posembed::token
