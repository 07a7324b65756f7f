// InputEmbedding: submodules hold the tables, and one operator computes the result.
#include <ATen/autocast_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randint.h>
#include <c10/util/accumulate.h>
#include <torch/nn/init.h>

#include <ostream>

#include "dispatcher/checks.h"
#include "input/input_operator.h"
#include "posembed/input.h"

namespace posembed {

const char* name(InputNorm norm) { return dispatcher::name_of(norm); }

namespace {

const char* name(PositionRule rule) {
  constexpr const char* names[] = {"consecutive", "roberta", "opt"};
  return names[static_cast<size_t>(rule)];
}

void check_size(const char* name, int64_t size) {
  TORCH_CHECK_VALUE(size >= 0, name, ": expected 0 or more, got ", size);
}

void check(const InputOptions& options) {
  const std::optional<int64_t>& rows = options.max_positions();
  const bool learned = options.positions() == Positions::learned;
  TORCH_CHECK_VALUE(!learned || rows.has_value(),
                    "max_positions: expected a number for learned positions, got none");
  TORCH_CHECK_VALUE(learned || !rows.has_value(),
                    "max_positions: expected none without learned positions, got ", *rows);
  check_size("num_types", options.num_types());
  check_size("token_dim", options.token_dim().value_or(0));
  check_size("output_dim", options.output_dim().value_or(0));
  TORCH_CHECK_VALUE(options.dropout() >= 0 && options.dropout() <= 1,
                    "dropout: expected 0 to 1, got ", options.dropout());
  dispatcher::check_eps(options.eps());
  TORCH_CHECK_VALUE(options.norm() != InputNorm::none || !options.eps().by_caller(),
                    "eps: expected none without a norm, got ", static_cast<double>(options.eps()));
}

void check_rule(const InputOptions& options) {
  const PositionRule rule = options.position_rule();
  const Positions positions = options.positions();
  TORCH_CHECK_VALUE(rule == PositionRule::consecutive || positions != Positions::none,
                    "position_rule: expected 'consecutive' without positions, got '", name(rule),
                    "'");
  TORCH_CHECK_VALUE(rule != PositionRule::opt || positions == Positions::learned,
                    "position_rule: expected 'consecutive' or 'roberta' without learned ",
                    "positions, got 'opt'");
  TORCH_CHECK_VALUE(rule != PositionRule::roberta || options.padding_idx().has_value(),
                    "padding_idx: expected an id where position_rule is 'roberta', got none");
  TORCH_CHECK_VALUE(!options.token_dim().has_value() || !options.output_dim().has_value(),
                    "output_dim: expected none beside token_dim, got ",
                    options.output_dim().value_or(0));
}

/// The row of position 0. A padding_idx below 0 counts from the table's end.
int64_t first_row_of(const InputOptions& options) {
  if (options.position_rule() == PositionRule::consecutive) return 0;
  if (options.position_rule() == PositionRule::opt) return 2;
  const int64_t padding = *options.padding_idx();
  return (padding < 0 ? padding + options.num_embeddings() : padding) + 1;
}

/// Draws from torch's generator, so that torch::manual_seed controls dropout; the same call as in
/// Python.
torch::Tensor draw_seed(const torch::Tensor& ids) {
  return at::randint(int64_t{1} << 62, {1}, ids.options().dtype(torch::kLong));
}

/// Whether the kernel can read a table; codes and rows that learn apart have look-ups of their own.
bool is_plain(const TokenEmbedding& table) {
  return table->weight.defined() && !table->trained.defined();
}

/// Replaces the token table by a table of `rows` [batch, seq, components], one for each token.
void take_rows(input::Input& in, const torch::Tensor& rows) {
  const at::IntArrayRef shape = rows.sizes().slice(0, static_cast<size_t>(rows.dim() - 1));
  in.token = rows.flatten(0, -2);
  in.ids =
      at::arange(c10::multiply_integers(shape), rows.options().dtype(torch::kLong)).view(shape);
  in.own_rows = true;
  in.scale(1.0).padding_idx(-1).gradient(TableGradient::dense);
}

/// Adds the rows of token types, by their table's own look-up, to rows that were taken.
void add_types(input::Input& in, TokenEmbedding& table, const std::optional<torch::Tensor>& given) {
  const torch::Tensor types = given.has_value() ? *given : at::zeros_like(in.ids);
  dispatcher::check_same_shape(types, "types", in.ids, "ids");
  in.token = in.token + table->forward(types).flatten(0, -2);
}

SinusoidalPositionalEmbedding sinusoids(const InputOptions& options) {
  SinusoidalOptions wanted(options.embedding_dim());
  if (options.position_rule() == PositionRule::roberta) {
    wanted.preset("fairseq").padding_idx(first_row_of(options) - 1);
  }
  return SinusoidalPositionalEmbedding(wanted);
}

/// Checks that either ids or inputs_embeds are given, and the shape and dtype of the latter.
void check_inputs(const torch::Tensor& ids, const std::optional<torch::Tensor>& inputs_embeds,
                  const torch::Tensor& table, const InputOptions& options) {
  const bool has_embeds = inputs_embeds.has_value();
  TORCH_CHECK_VALUE(ids.defined() != has_embeds,
                    "inputs_embeds: expected either ids or inputs_embeds, ", "got ",
                    has_embeds ? "both" : "neither");
  if (!has_embeds) return;
  dispatcher::check_floating(*inputs_embeds, "inputs_embeds");
  const int64_t width = options.token_dim().value_or(options.embedding_dim());
  TORCH_CHECK_VALUE(inputs_embeds->dim() == 3 && inputs_embeds->size(2) == width,
                    "inputs_embeds: expected [batch, seq, ", width, "], got ",
                    inputs_embeds->sizes());
  if (!table.defined() || at::autocast::is_autocast_enabled(table.device().type())) return;
  dispatcher::check_same_dtype(*inputs_embeds, "inputs_embeds", table, "the tables");
}

}  // namespace

torch::Tensor functional::input_embedding(const torch::Tensor& ids, const torch::Tensor& token,
                                          const InputParts& parts) {
  input::Input in{parts, token, ids};
  in.positions(parts.offset().positions(parts.positions(), ids)).offset(parts.offset().number());
  if (parts.dropout() > 0 && !parts.seed().has_value()) in.seed(draw_seed(ids));
  if (parts.dropout() == 0) in.seed(std::nullopt);
  return input::input_embedding(in);
}

InputNormImpl::InputNormImpl(InputNorm kind, int64_t embedding_dim, double eps)
    : kind(kind), embedding_dim(embedding_dim), eps(eps) {
  dispatcher::check_eps(eps);
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

void InputProjectionImpl::pretty_print(std::ostream& stream) const {
  stream << "Linear(in_features=" << options.in_features()
         << ", out_features=" << options.out_features()
         << ", bias=" << (options.bias() ? "True" : "False") << ")";
}

InputEmbeddingImpl::InputEmbeddingImpl(const InputOptions& options) : options(options) {
  InputEmbeddingImpl::reset();
}

void InputEmbeddingImpl::reset() {
  check(options);
  check_rule(options);
  const int64_t dim = options.embedding_dim(), token_dim = options.token_dim().value_or(dim);
  token = register_module("token", TokenEmbedding(TokenOptions(options.num_embeddings(), token_dim)
                                                      .padding_idx(options.padding_idx())
                                                      .scale(options.scale())
                                                      .gradient(options.gradient())));
  if (options.positions() == Positions::learned) {
    learned = register_module(
        "position",
        LearnedPositionalEmbedding(
            LearnedOptions(*options.max_positions(), dim).first_row(first_row_of(options))));
  } else if (options.positions() == Positions::sinusoidal) {
    sinusoidal = register_module("position", sinusoids(options));
  }
  if (options.num_types() > 0) {
    token_type =
        register_module("token_type", TokenEmbedding(TokenOptions(options.num_types(), dim)));
  }
  if (options.norm() != InputNorm::none) {
    norm = register_module("norm",
                           std::make_shared<InputNormImpl>(options.norm(), dim, options.eps()));
  }
  if (options.token_dim().has_value()) {
    projection =
        register_module("projection", std::make_shared<InputProjectionImpl>(
                                          torch::nn::LinearOptions(token_dim, dim).bias(false)));
  } else if (options.output_dim().has_value()) {
    projection = register_module("projection",
                                 std::make_shared<InputProjectionImpl>(dim, *options.output_dim()));
  }
  if (learned && options.position_rule() == PositionRule::roberta) {
    const torch::NoGradGuard no_grad;
    learned->weight[learned->options.first_row() - 1].zero_();
  }
}

void InputEmbeddingImpl::pretty_print(std::ostream& stream) const { stream << "InputEmbedding"; }

/// @param known  whether ids are those of tokens, not indices of given rows
std::optional<torch::Tensor> InputEmbeddingImpl::count_positions(const torch::Tensor& ids,
                                                                 bool known,
                                                                 const InputCall& call) const {
  const PositionRule rule = options.position_rule();
  const std::optional<torch::Tensor>&positions = call.positions(), &mask = call.attention_mask();
  const Offset& offset = call.offset();
  TORCH_CHECK_VALUE(!mask.has_value() || (rule == PositionRule::opt && !positions.has_value()),
                    "attention_mask: expected none unless position_rule is 'opt' and positions ",
                    "are counted");
  const bool counts_padding = mask.has_value() || (known && rule == PositionRule::roberta);
  TORCH_CHECK_VALUE(!offset.of_samples().has_value() || !counts_padding,
                    "offset: expected a number where padding is counted, got ",
                    offset.of_samples()->sizes());
  TORCH_CHECK_VALUE(!call.cu_seqlens().has_value() || !counts_padding,
                    "cu_seqlens: expected none where padding is counted");
  if (call.cu_seqlens().has_value()) {
    return offset.positions(positions, ids, 0, 1, call.cu_seqlens());
  }
  const c10::SymInt& number = offset.number();
  TORCH_CHECK_VALUE(!positions.has_value() || number == 0,
                    "offset: expected 0 where positions are given, got ", number);
  if (positions.has_value() || !counts_padding) return offset.positions(positions, ids);
  const int64_t past = number.expect_int();
  if (mask.has_value()) {
    const int64_t tokens = past + ids.size(-1);
    TORCH_CHECK_VALUE(mask->dim() > 0 && mask->size(-1) == tokens,
                      "attention_mask: expected [batch, offset + seq] with offset + seq ", tokens,
                      ", got ", mask->sizes());
    return functional::opt_positions(*mask, past);
  }
  return functional::roberta_positions(ids, first_row_of(options) - 1, past);
}

torch::Tensor InputEmbeddingImpl::forward(const torch::Tensor& ids, const InputCall& call) {
  const std::optional<torch::Tensor>& inputs_embeds = call.inputs_embeds();
  check_inputs(ids, inputs_embeds, token->weight, options);
  input::Input in;
  in.token = token->weight;
  in.ids = ids;
  in.scale(token->options.scale())
      .padding_idx(token->options.padding_idx().value_or(-1))
      .gradient(token->options.gradient());
  const bool projects = options.token_dim().has_value();
  const bool adds_types = token_type && !is_plain(token_type);
  if (projects || inputs_embeds.has_value() || adds_types || !is_plain(token)) {
    const torch::Tensor rows = inputs_embeds.has_value() ? *inputs_embeds : token->forward(ids);
    take_rows(in, projects ? projection->forward(rows) : rows);
    if (adds_types) add_types(in, token_type, call.types());
  }
  const bool known = ids.defined();
  in.positions(count_positions(known ? ids : in.ids, known, call));
  if (!in.positions().has_value()) in.offset(call.offset().number());
  if (learned) {
    in.position(learned->weight).first_row(learned->options.first_row());
    if (options.position_rule() == PositionRule::roberta) {
      in.position_padding_idx(in.first_row() - 1);
    }
  }
  if (sinusoidal) in.sinusoid(sinusoidal->options.spec());
  if (!adds_types) {
    in.types(call.types());
    if (token_type) in.token_type(token_type->weight);
  }
  if (norm != nullptr) {
    in.norm(norm->kind).norm_weight(norm->weight).eps(norm->eps);
    if (norm->bias.defined()) in.norm_bias(norm->bias);
  }
  if (is_training() && options.dropout() > 0) {
    in.dropout(options.dropout()).first_token(call.first_token());
    in.seed(call.seed().has_value() ? *call.seed() : draw_seed(in.ids));
  }
  const torch::Tensor result = input::input_embedding(in);
  return options.output_dim().has_value() ? projection->forward(result) : result;
}

torch::Tensor InputEmbeddingImpl::with_embeddings(const torch::Tensor& ids,
                                                  const torch::Tensor& features,
                                                  const torch::Tensor& mask,
                                                  const InputCall& call) {
  TORCH_CHECK_VALUE(!call.inputs_embeds().has_value(), "inputs_embeds: expected none beside ids");
  InputCall counted = call;
  counted.inputs_embeds(token->with_embeddings(ids, features, mask));
  if (options.position_rule() == PositionRule::roberta && !call.positions().has_value()) {
    const torch::Tensor tokens = ids.masked_fill(mask, first_row_of(options));  // never padding
    counted.positions(count_positions(tokens, /*known=*/true, call)).offset(0);
  }
  return forward({}, counted);
}

}  // namespace posembed
