// LearnedPositionalEmbedding and the functional interface: thin wrappers around the operators.
#include <torch/nn/init.h>
#include <torch/utils.h>

#include <ostream>

#include "dispatcher/checks.h"
#include "learned/operator.h"
#include "posembed/learned.h"
#include "posembed/memory.h"

namespace posembed {

namespace functional {

torch::Tensor learned_add(const torch::Tensor& x, const torch::Tensor& weight,
                          const PositionCall& call, int64_t first_row) {
  const Offset& offset = call.offset();
  return learned::learned_add(x, weight,
                              {offset.positions(call.positions(), x, x.dim() - 3, x.dim() - 2),
                               offset.number(), first_row});
}

torch::Tensor learned_encode(const torch::Tensor& weight, const torch::Tensor& positions,
                             int64_t first_row) {
  return learned::learned_encode(weight, positions, first_row);
}

torch::Tensor learned_extend(const torch::Tensor& weight, int64_t max_positions, int64_t first_row,
                             const std::string& method) {
  return learned::learned_extend(weight, max_positions, first_row, method);
}

torch::Tensor roberta_positions(const torch::Tensor& ids, int64_t padding_idx,
                                int64_t past_length) {
  dispatcher::check_integers(ids, "ids");
  return learned::learned_positions(ids.ne(padding_idx), past_length, 0);
}

torch::Tensor opt_positions(const torch::Tensor& attention_mask, int64_t past_length) {
  return learned::learned_positions(attention_mask, 0, past_length);
}

torch::Tensor fairseq_positions(const torch::Tensor& ids, int64_t padding_idx) {
  return roberta_positions(ids, padding_idx, 0);
}

}  // namespace functional

LearnedPositionalEmbeddingImpl::LearnedPositionalEmbeddingImpl(const LearnedOptions& options)
    : options(options) {
  LearnedPositionalEmbeddingImpl::reset();
}

void LearnedPositionalEmbeddingImpl::reset() {
  TORCH_CHECK_VALUE(options.max_positions() >= 0, "max_positions: expected 0 or more, got ",
                    options.max_positions());
  TORCH_CHECK_VALUE(options.embedding_dim() >= 0, "embedding_dim: expected 0 or more, got ",
                    options.embedding_dim());
  TORCH_CHECK_VALUE(options.first_row() >= 0, "first_row: expected 0 or more, got ",
                    options.first_row());
  weight = register_parameter("weight", torch::empty({options.first_row() + options.max_positions(),
                                                      options.embedding_dim()}));
  reset_parameters();
}

void LearnedPositionalEmbeddingImpl::reset_parameters() {
  prefer_huge_pages(weight);
  torch::nn::init::normal_(weight, 0.0, 0.02);
}

void LearnedPositionalEmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << "LearnedPositionalEmbedding(" << options.max_positions() << ", "
         << options.embedding_dim();
  if (options.first_row() != 0) stream << ", first_row=" << options.first_row();
  stream << ")";
}

torch::Tensor LearnedPositionalEmbeddingImpl::forward(const torch::Tensor& x,
                                                      const PositionCall& call) {
  return functional::learned_add(x, weight, call, options.first_row());
}

torch::Tensor LearnedPositionalEmbeddingImpl::encode(const torch::Tensor& positions) {
  return functional::learned_encode(weight, positions, options.first_row());
}

void LearnedPositionalEmbeddingImpl::extend(int64_t max_positions, const std::string& method) {
  const torch::NoGradGuard no_grad;
  weight.set_data(functional::learned_extend(weight, max_positions, options.first_row(), method));
  weight.mutable_grad() = torch::Tensor();
  options.max_positions(max_positions);
}

}  // namespace posembed
