// TokenEmbedding and functional::embedding: thin wrappers around the operators.
#include <ATen/autocast_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/embedding_renorm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>
#include <ostream>
#include <string>
#include <vector>

#include "dispatcher/checks.h"
#include "dispatcher/cuda_scope.h"
#include "posembed/pretrained.h"
#include "posembed/token.h"
#include "pretrained/token_rows.h"
#include "token/operator.h"
#include "token/table_module.h"

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

const char* name(TableGradient gradient) {
  return gradient == TableGradient::rows ? "rows" : "dense";
}

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

TokenEmbedding TokenEmbedding::from_file(
    const std::string& path, const std::optional<std::vector<std::string>>& vocabulary) {
  return from_file(path, vocabulary, pretrained::ReadOptions());
}

TokenEmbedding TokenEmbedding::from_file(const std::string& path,
                                         const std::optional<std::vector<std::string>>& vocabulary,
                                         const pretrained::ReadOptions& read, bool freeze,
                                         TokenOptions options) {
  return from_file(path, vocabulary, read, freeze, std::move(options), pretrained::OpenOptions());
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
