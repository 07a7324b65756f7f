// GPT-2: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019. Its file has
// projections as [inputs, outputs], and query, key and value in one: a transform turns them and
// takes them apart.
#pragma once

#include <posembed/input.h>
#include <torch/nn/modules/container/modulelist.h>

#include "names.h"

namespace example {

class Gpt2BlockImpl : public torch::nn::Module {
 public:
  Gpt2BlockImpl(int64_t width, int64_t heads)
      : heads_(heads),
        attention_norm_(register_module("attention_norm", layer_norm(width, 1e-5))),
        query_(register_module("query", torch::nn::Linear(width, width))),
        key_(register_module("key", torch::nn::Linear(width, width))),
        value_(register_module("value", torch::nn::Linear(width, width))),
        mixed_(register_module("mixed", torch::nn::Linear(width, width))),
        feedforward_norm_(register_module("feedforward_norm", layer_norm(width, 1e-5))),
        up_(register_module("up", torch::nn::Linear(width, 4 * width))),
        down_(register_module("down", torch::nn::Linear(4 * width, width))) {}

  torch::Tensor forward(torch::Tensor x) {
    const torch::Tensor y = attention_norm_(x);
    x = x + mixed_(attend(query_(y), key_(y), value_(y), heads_, /*causal=*/true));
    return x + down_(torch::gelu(up_(feedforward_norm_(x)), "tanh"));
  }

 private:
  int64_t heads_;
  torch::nn::LayerNorm attention_norm_;
  torch::nn::Linear query_, key_, value_, mixed_;
  torch::nn::LayerNorm feedforward_norm_;
  torch::nn::Linear up_, down_;
};
TORCH_MODULE(Gpt2Block);

class Gpt2Impl : public torch::nn::Module {
 public:
  Gpt2Impl(const posembed::InputOptions& input, int64_t layers, int64_t heads)
      : embed_(register_module("embed", posembed::InputEmbedding(input))),
        layers_(register_module("layers", torch::nn::ModuleList())),
        norm_(register_module("norm", layer_norm(input.embedding_dim(), 1e-5))) {
    for (int64_t i = 0; i < layers; ++i)
      layers_->push_back(Gpt2Block(input.embedding_dim(), heads));
  }

  /// int64 ids [batch, seq] -> logits [batch, seq, vocabulary]
  torch::Tensor forward(const torch::Tensor& ids) {
    torch::Tensor x = embed_(ids);
    for (const auto& layer : *layers_) x = layer->as<Gpt2Block>()->forward(x);
    return embed_->token->logits(norm_(x));
  }

 private:
  posembed::InputEmbedding embed_;
  torch::nn::ModuleList layers_;
  torch::nn::LayerNorm norm_;
};
TORCH_MODULE(Gpt2);

/// A parameter's part of the file's tensor: query, key and value are thirds, projections turned.
inline torch::Tensor part_of_gpt2(const std::string& name, const torch::Tensor& tensor) {
  torch::Tensor part = tensor;
  const char* thirds[] = {".query.", ".key.", ".value."};
  for (int64_t i = 0; i < 3; ++i) {
    if (name.find(thirds[i]) != std::string::npos) part = tensor.chunk(3, /*dim=*/-1)[i];
  }
  const bool is_table = name.rfind("embed.", 0) == 0;
  return part.dim() == 2 && !is_table ? part.t() : part;
}

inline Gpt2 load_gpt2(const std::string& path, int64_t heads) {
  const auto file = posembed::pretrained::open(path);
  const std::string prefix = has(file, "wte.weight") ? "" : "transformer.";
  const auto tokens = file.shape(prefix + "wte.weight");
  const auto positions = file.shape(prefix + "wpe.weight");
  Gpt2 model(posembed::InputOptions(tokens[0], tokens[1]).max_positions(positions[0]),
             count_layers(file, "h."), heads);
  const Words words = {{"embed", ""},
                       {"token", "wte"},
                       {"position", "wpe"},
                       {"layers", "h"},
                       {"query", "attn.c_attn"},
                       {"key", "attn.c_attn"},
                       {"value", "attn.c_attn"},
                       {"mixed", "attn.c_proj"},
                       {"up", "mlp.c_fc"},
                       {"down", "mlp.c_proj"},
                       {"norm", "ln_f"},
                       {"attention_norm", "ln_1"},
                       {"feedforward_norm", "ln_2"}};
  load(*model, file,
       posembed::pretrained::LoadOptions()
           .name_in_file([&](const std::string& name) { return prefix + translated(name, words); })
           .transform(part_of_gpt2));
  return model;
}

}  // namespace example
