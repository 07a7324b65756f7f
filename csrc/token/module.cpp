// TokenEmbedding and functional::embedding for C++: options and the table kept, the operator
// called.
#include <ATen/ops/embedding_renorm.h>
#include <ATen/ops/linear.h>
#include <torch/nn/init.h>

#include <ostream>
#include <vector>

#include "posembed/token.h"
#include "token/operator.h"

namespace posembed {
namespace {

void check(TokenOptions& options) {
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
  if (options.sparse()) options.gradient(TableGradient::rows);
  options.sparse(options.gradient() == TableGradient::rows);
}

}  // namespace

const char* name(TableGradient gradient) {
  return gradient == TableGradient::rows ? "rows" : "dense";
}

torch::Tensor functional::embedding(const torch::Tensor& ids, const torch::Tensor& weight,
                                    const EmbeddingCall& call) {
  return token::call_embedding(weight, ids, call.padding_idx, call.scale, call.scale_grad_by_freq,
                               posembed::name(call.gradient), call.vocabulary_start);
}

TokenEmbeddingImpl::TokenEmbeddingImpl(TokenOptions given) : options(std::move(given)) {
  TokenEmbeddingImpl::reset();
}

void TokenEmbeddingImpl::reset() {
  check(options);
  // A clone is reset while it still holds the original's table: frozen stays frozen.
  const bool trainable = !weight.defined() || weight.requires_grad();
  if (!options._weight().defined()) {
    weight = register_parameter(
        "weight", torch::empty({options.num_embeddings(), options.embedding_dim()}), trainable);
    reset_parameters();
    return;
  }
  const std::vector<int64_t> expected = {options.num_embeddings(), options.embedding_dim()};
  TORCH_CHECK_VALUE(options._weight().sizes() == torch::IntArrayRef(expected),
                    "_weight: expected shape ", expected, ", got ", options._weight().sizes());
  weight = register_parameter("weight", options._weight());
  options._weight(torch::Tensor());  // a clone makes its own table
}

void TokenEmbeddingImpl::reset_parameters() {
  torch::nn::init::normal_(weight);
  if (options.padding_idx().has_value()) {
    const torch::NoGradGuard no_grad;
    weight[*options.padding_idx()].fill_(0);
  }
}

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
  if (options.max_norm().has_value()) {
    const torch::NoGradGuard no_grad;
    torch::Tensor table = weight.detach();
    functional::embedding(ids, table.narrow(1, 0, 1), {});  // refuses bad ids before any write
    const torch::Tensor known = ids.clamp(0, table.size(0) - 1).contiguous();
    at::embedding_renorm_(table, known, *options.max_norm(), options.norm_type());
  }
  return functional::embedding(ids, weight,
                               {options.padding_idx().value_or(-1), options.scale(),
                                options.scale_grad_by_freq(), options.gradient()});
}

torch::Tensor TokenEmbeddingImpl::logits(const torch::Tensor& hidden) {
  return at::linear(hidden, weight);
}

TokenEmbedding TokenEmbedding::from_pretrained(const torch::Tensor& weight, bool freeze,
                                               TokenOptions options) {
  TORCH_CHECK_VALUE(weight.dim() == 2, "weight: expected [num_embeddings, embedding_dim], got ",
                    weight.sizes());
  options.num_embeddings(weight.size(0)).embedding_dim(weight.size(1))._weight(weight);
  TokenEmbedding module(std::move(options));
  module->weight.set_requires_grad(!freeze);
  return module;
}

TokenEmbedding TokenEmbedding::from_file(const std::string& path,
                                         const std::optional<std::vector<std::string>>& vocabulary,
                                         const pretrained::ReadOptions& read, bool freeze,
                                         TokenOptions options) {
  const pretrained::VectorFile file = pretrained::open(path);
  const torch::Tensor table =
      vocabulary.has_value() ? file.rows(*vocabulary, read).vectors : file.table(read);
  return from_pretrained(table, freeze, std::move(options));
}

}  // namespace posembed
