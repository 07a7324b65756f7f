// InputEmbedding for C++: submodules hold the tables, one operator does the work.
#include <ATen/ops/randint.h>
#include <torch/nn/init.h>

#include <ostream>

#include "input/operator.h"
#include "posembed/input.h"

namespace posembed {
namespace {

const char* norm_name(InputNorm norm) {
  switch (norm) {
    case InputNorm::layer:
      return "layer";
    case InputNorm::rms:
      return "rms";
    default:
      return "none";
  }
}

void check(const InputOptions& options) {
  const bool learned = options.positions() == Positions::learned;
  TORCH_CHECK_VALUE(learned == options.max_positions().has_value(), "max_positions: expected ",
                    learned ? "a number for learned positions" : "none without learned positions",
                    ", got ", learned ? "none" : "a number");
  TORCH_CHECK_VALUE(options.num_types() >= 0, "num_types: expected 0 or more, got ",
                    options.num_types());
  TORCH_CHECK_VALUE(options.dropout() >= 0 && options.dropout() <= 1,
                    "dropout: expected 0 to 1, got ", options.dropout());
}

/// From torch's generator, so that torch::manual_seed governs dropout; the same call as in Python.
torch::Tensor draw_seed(const torch::Tensor& ids) {
  return at::randint(int64_t{1} << 62, {1}, ids.options().dtype(torch::kLong));
}

}  // namespace

InputNormImpl::InputNormImpl(InputNorm kind, int64_t embedding_dim, double eps)
    : kind(kind), embedding_dim(embedding_dim), eps(eps) {
  InputNormImpl::reset();
}

void InputNormImpl::reset() {
  weight = register_parameter("weight", torch::ones({embedding_dim}));
  if (kind == InputNorm::layer) bias = register_parameter("bias", torch::zeros({embedding_dim}));
}

void InputNormImpl::pretty_print(std::ostream& stream) const {
  stream << (kind == InputNorm::layer ? "LayerNorm((" : "RMSNorm((") << embedding_dim
         << ",), eps=" << eps << ", elementwise_affine=True)";
}

InputEmbeddingImpl::InputEmbeddingImpl(const InputOptions& options) : options(options) {
  InputEmbeddingImpl::reset();
}

void InputEmbeddingImpl::reset() {
  check(options);
  const int64_t dim = options.embedding_dim();
  token = register_module("token", TokenEmbedding(TokenOptions(options.num_embeddings(), dim)
                                                      .padding_idx(options.padding_idx())
                                                      .scale(options.scale())
                                                      .gradient(options.gradient())));
  if (options.positions() == Positions::learned) {
    learned = register_module(
        "position", LearnedPositionalEmbedding(LearnedOptions(*options.max_positions(), dim)));
  } else if (options.positions() == Positions::sinusoidal) {
    sinusoidal = register_module("position", SinusoidalPositionalEmbedding(dim));
  }
  if (options.num_types() > 0) {
    token_type =
        register_module("token_type", TokenEmbedding(TokenOptions(options.num_types(), dim)));
  }
  if (options.norm() != InputNorm::none) {
    norm = register_module("norm",
                           std::make_shared<InputNormImpl>(options.norm(), dim, options.eps()));
  }
}

void InputEmbeddingImpl::pretty_print(std::ostream& stream) const { stream << "InputEmbedding"; }

torch::Tensor InputEmbeddingImpl::forward(const torch::Tensor& ids,
                                          const std::optional<torch::Tensor>& positions,
                                          const std::optional<torch::Tensor>& types,
                                          int64_t offset) {
  input::Input in;
  in.token = token->weight;
  in.ids = ids;
  in.positions = positions;
  in.types = types;
  in.offset = offset;
  in.scale = token->options.scale();
  in.padding_idx = token->options.padding_idx().value_or(-1);
  in.gradient = posembed::name(token->options.gradient());
  if (learned) {
    in.position = learned->weight;
    in.first_row = learned->options.first_row();
  }
  if (sinusoidal) in.sinusoid = sinusoidal->options.spec().to_json();
  if (token_type) in.token_type = token_type->weight;
  if (norm != nullptr) {
    in.norm = norm_name(norm->kind);
    in.norm_weight = norm->weight;
    if (norm->bias.defined()) in.norm_bias = norm->bias;
    in.eps = norm->eps;
  }
  if (is_training() && options.dropout() > 0) {
    in.dropout = options.dropout();
    in.seed = draw_seed(ids);
  }
  return input::call_input_embedding(in);
}

}  // namespace posembed
