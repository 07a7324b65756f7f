// A small causal language model over bytes. The position methods differ in where they enter:
// learned and sinusoidal encodings are added to the embedded tokens, RoPE rotates query and key in
// every block, and ALiBi is a bias on the attention scores.
#pragma once

#include <posembed/alibi.h>
#include <posembed/learned.h>
#include <posembed/rotary.h>
#include <posembed/sinusoidal.h>
#include <posembed/token.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/utils.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "settings.h"

namespace language_model {

inline torch::nn::LayerNorm norm(int64_t width) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}));
}

inline torch::nn::Linear linear(int64_t inputs, int64_t outputs) {
  return torch::nn::Linear(torch::nn::LinearOptions(inputs, outputs).bias(false));
}

/// A pre-norm residual block: attention, then a feed-forward layer.
class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl(int64_t width, int64_t heads)
      : heads_(heads),
        attention_norm_(register_module("attention_norm", norm(width))),
        query_key_value_(register_module("query_key_value", linear(width, 3 * width))),
        attention_output_(register_module("attention_output", linear(width, width))),
        feedforward_norm_(register_module("feedforward_norm", norm(width))),
        up_(register_module("up", linear(width, 4 * width))),
        down_(register_module("down", linear(4 * width, width))) {}

  /// x: [batch, seq, width]; bias: [1, heads, seq, seq], causal mask included, or none.
  torch::Tensor forward(torch::Tensor x, posembed::RotaryEmbedding& rope,
                        const std::optional<torch::Tensor>& bias) {
    x = x + attention_output_(attend(attention_norm_(x), rope, bias));
    return x + down_(torch::gelu(up_(feedforward_norm_(x))));
  }

 private:
  torch::Tensor attend(const torch::Tensor& x, posembed::RotaryEmbedding& rope,
                       const std::optional<torch::Tensor>& bias) {
    // [batch, seq, 3 * width] -> three of [batch, heads, seq, head_dim], still views
    const auto parts =
        query_key_value_(x).unflatten(-1, {3, heads_, -1}).permute({2, 0, 3, 1, 4}).unbind();
    auto query = parts[0], key = parts[1];
    if (rope) std::tie(query, key) = rope->forward(query, key);
    const auto mixed = torch::scaled_dot_product_attention(query, key, parts[2], bias,
                                                           /*dropout_p=*/0.0, /*is_causal=*/!bias);
    return mixed.transpose(1, 2).flatten(2);
  }

  int64_t heads_;
  torch::nn::LayerNorm attention_norm_;
  torch::nn::Linear query_key_value_, attention_output_;
  torch::nn::LayerNorm feedforward_norm_;
  torch::nn::Linear up_, down_;
};
TORCH_MODULE(Block);

class DecoderImpl : public torch::nn::Module {
 public:
  /// Draws initial values on the CPU from `settings.seed`, in the order of parameters().
  DecoderImpl(const std::string& method, const Settings& settings) {
    // Small weights learn fast; after scaling, they are as large as sinusoids of amplitude 1.
    const auto options = posembed::TokenOptions(256, settings.width).sqrt_dim();
    token_ = register_module("token", posembed::TokenEmbedding(options));
    add_positions(method, settings);
    for (int64_t i = 0; i < settings.layers; ++i) {
      blocks_.push_back(
          register_module("block" + std::to_string(i), Block(settings.width, settings.heads)));
    }
    norm_ = register_module("norm", norm(settings.width));

    torch::manual_seed(settings.seed);
    torch::NoGradGuard no_grad;
    for (auto& parameter : parameters()) {
      if (parameter.dim() > 1) parameter.normal_(0.0, 0.02);  // norms keep their ones and zeros
    }
  }

  /// int64 ids [batch, seq] -> logits of the next byte [batch, seq, 256].
  torch::Tensor forward(const torch::Tensor& ids) {
    auto x = token_->forward(ids);
    if (learned_) x = learned_->forward(x);
    if (sinusoidal_) x = sinusoidal_->forward(x);
    std::optional<torch::Tensor> bias;
    if (alibi_) bias = alibi_->forward(ids.size(1)).unsqueeze(0);
    for (auto& block : blocks_) x = block->forward(x, rope_, bias);
    return token_->logits(norm_(x));
  }

 private:
  void add_positions(const std::string& method, const Settings& settings) {
    const int64_t head_dim = settings.width / settings.heads;
    if (method == "learned") {
      learned_ = register_module(
          "learned", posembed::LearnedPositionalEmbedding(settings.length, settings.width));
    } else if (method == "sinusoidal") {
      sinusoidal_ =
          register_module("sinusoidal", posembed::SinusoidalPositionalEmbedding(settings.width));
    } else if (method == "rope") {
      const auto options = posembed::RotaryOptions(head_dim).layout(posembed::Layout::bhsd);
      rope_ = register_module("rope", posembed::RotaryEmbedding(options));
    } else if (method == "alibi") {
      alibi_ = register_module("alibi", posembed::ALiBi(settings.heads));
    } else if (method != "none") {
      throw std::invalid_argument("--methods: no position method is called " + method);
    }
  }

  posembed::TokenEmbedding token_{nullptr};
  posembed::LearnedPositionalEmbedding learned_{nullptr};
  posembed::SinusoidalPositionalEmbedding sinusoidal_{nullptr};
  posembed::RotaryEmbedding rope_{nullptr};
  posembed::ALiBi alibi_{nullptr};
  std::vector<Block> blocks_;
  torch::nn::LayerNorm norm_{nullptr};
};
TORCH_MODULE(Decoder);

}  // namespace language_model
