// A model of the Llama family: pre-norm blocks of grouped-query attention with rotated query and
// key, and a gated feed-forward layer. Touvron et al., arXiv:2302.13971. Modules are registered
// under transformers' names, so that posembed::pretrained::load_state fills them by name.
#pragma once

#include <posembed/rotary.h>
#include <posembed/token.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/utils.h>

#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace generate {

struct Sizes {
  explicit Sizes(const nlohmann::json& config)
      : vocabulary(config.at("vocab_size")),
        width(config.at("hidden_size")),
        inner(config.at("intermediate_size")),
        layers(config.at("num_hidden_layers")),
        heads(config.at("num_attention_heads")),
        key_heads(config.value("num_key_value_heads", heads)),
        eps(config.at("rms_norm_eps")),
        tied(config.value("tie_word_embeddings", false)) {}

  int64_t vocabulary, width, inner, layers, heads, key_heads;
  double eps;
  bool tied;  // the token table is also the output head
};

inline torch::nn::Linear linear(int64_t inputs, int64_t outputs) {
  return torch::nn::Linear(torch::nn::LinearOptions(inputs, outputs).bias(false));
}

class NormImpl : public torch::nn::Module {
 public:
  explicit NormImpl(const Sizes& sizes)
      : weight_(register_parameter("weight", torch::ones({sizes.width}))), eps_(sizes.eps) {}

  torch::Tensor forward(const torch::Tensor& x) {
    return torch::rms_norm(x, weight_.sizes(), weight_, eps_);
  }

 private:
  torch::Tensor weight_;
  double eps_;
};
TORCH_MODULE(Norm);

class AttentionImpl : public torch::nn::Module {
 public:
  AttentionImpl(const Sizes& sizes, const posembed::RotarySpec& spec)
      : head_dim_(spec.head_dim),
        q_(register_module("q_proj", linear(sizes.width, sizes.heads * head_dim_))),
        k_(register_module("k_proj", linear(sizes.width, sizes.key_heads * head_dim_))),
        v_(register_module("v_proj", linear(sizes.width, sizes.key_heads * head_dim_))),
        o_(register_module("o_proj", linear(sizes.heads * head_dim_, sizes.width))),
        rope_(posembed::RotaryOptions(spec).layout(posembed::Layout::bhsd)) {}

  /// x: [1, seq, width], the tokens after those of the cache.
  torch::Tensor forward(const torch::Tensor& x) {
    const int64_t past = keys_.defined() ? keys_.size(2) : 0;
    const auto [query, key] =
        rope_(split(q_(x)), split(k_(x)), posembed::RotaryCall().offset(past));
    const torch::Tensor value = split(v_(x));
    keys_ = past > 0 ? torch::cat({keys_, key}, 2) : key;
    values_ = past > 0 ? torch::cat({values_, value}, 2) : value;
    const torch::Tensor mixed = torch::scaled_dot_product_attention(
        query, keys_, values_, {}, /*dropout_p=*/0.0, /*is_causal=*/x.size(1) > 1,
        /*scale=*/std::nullopt, /*enable_gqa=*/true);
    return o_(mixed.transpose(1, 2).flatten(2));
  }

 private:
  /// [1, seq, heads * head_dim] -> [1, heads, seq, head_dim], a view
  torch::Tensor split(const torch::Tensor& x) const {
    return x.unflatten(-1, {-1, head_dim_}).transpose(1, 2);
  }

  int64_t head_dim_;
  torch::nn::Linear q_, k_, v_, o_;
  posembed::RotaryEmbedding rope_;
  torch::Tensor keys_, values_;  // [1, key_heads, past, head_dim]
};
TORCH_MODULE(Attention);

class FeedForwardImpl : public torch::nn::Module {
 public:
  explicit FeedForwardImpl(const Sizes& sizes)
      : gate_(register_module("gate_proj", linear(sizes.width, sizes.inner))),
        up_(register_module("up_proj", linear(sizes.width, sizes.inner))),
        down_(register_module("down_proj", linear(sizes.inner, sizes.width))) {}

  torch::Tensor forward(const torch::Tensor& x) { return down_(torch::silu(gate_(x)) * up_(x)); }

 private:
  torch::nn::Linear gate_, up_, down_;
};
TORCH_MODULE(FeedForward);

class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl(const Sizes& sizes, const posembed::RotarySpec& spec)
      : attention_norm_(register_module("input_layernorm", Norm(sizes))),
        attention_(register_module("self_attn", Attention(sizes, spec))),
        feedforward_norm_(register_module("post_attention_layernorm", Norm(sizes))),
        feedforward_(register_module("mlp", FeedForward(sizes))) {}

  torch::Tensor forward(torch::Tensor x) {
    x = x + attention_(attention_norm_(x));
    return x + feedforward_(feedforward_norm_(x));
  }

 private:
  Norm attention_norm_;
  Attention attention_;
  Norm feedforward_norm_;
  FeedForward feedforward_;
};
TORCH_MODULE(Block);

class LlamaImpl : public torch::nn::Module {
 public:
  LlamaImpl(const Sizes& sizes, const std::vector<posembed::RotarySpec>& of_layers)
      : token_(register_module("embed_tokens",
                               posembed::TokenEmbedding(sizes.vocabulary, sizes.width))),
        layers_(register_module("layers", torch::nn::ModuleList())),
        norm_(register_module("norm", Norm(sizes))) {
    for (const posembed::RotarySpec& spec : of_layers) layers_->push_back(Block(sizes, spec));
    if (!sizes.tied) head_ = register_module("lm_head", linear(sizes.width, sizes.vocabulary));
  }

  /// int64 ids [1, seq] -> logits of the token after the last one [vocabulary]
  torch::Tensor forward(const torch::Tensor& ids) {
    torch::Tensor x = token_(ids);
    for (const auto& layer : *layers_) x = layer->as<Block>()->forward(x);
    const torch::Tensor last = norm_(x)[0][-1];
    return head_ ? head_(last) : token_->logits(last);
  }

 private:
  posembed::TokenEmbedding token_;
  torch::nn::ModuleList layers_;
  Norm norm_;
  torch::nn::Linear head_{nullptr};
};
TORCH_MODULE(Llama);

}  // namespace generate
