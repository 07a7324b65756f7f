// BERT: Devlin et al., arXiv:1810.04805. The program has one projection for query, key and value,
// the file three: names_in_file() joins them.
#pragma once

#include <posembed/input.h>
#include <torch/nn/modules/container/modulelist.h>

#include "names.h"

namespace example {

class BertBlockImpl : public torch::nn::Module {
 public:
  BertBlockImpl(int64_t width, int64_t inner, int64_t heads)
      : heads_(heads),
        packed_(register_module("packed", torch::nn::Linear(width, 3 * width))),
        mixed_(register_module("mixed", torch::nn::Linear(width, width))),
        attention_norm_(register_module("attention_norm", layer_norm(width, 1e-12))),
        up_(register_module("up", torch::nn::Linear(width, inner))),
        down_(register_module("down", torch::nn::Linear(inner, width))),
        feedforward_norm_(register_module("feedforward_norm", layer_norm(width, 1e-12))) {}

  torch::Tensor forward(torch::Tensor x) {
    const auto parts = packed_(x).chunk(3, /*dim=*/-1);
    const torch::Tensor seen = attend(parts[0], parts[1], parts[2], heads_, /*causal=*/false);
    x = attention_norm_(x + mixed_(seen));
    return feedforward_norm_(x + down_(torch::gelu(up_(x))));
  }

 private:
  int64_t heads_;
  torch::nn::Linear packed_, mixed_;
  torch::nn::LayerNorm attention_norm_;
  torch::nn::Linear up_, down_;
  torch::nn::LayerNorm feedforward_norm_;
};
TORCH_MODULE(BertBlock);

class BertImpl : public torch::nn::Module {
 public:
  BertImpl(const posembed::InputOptions& input, int64_t inner, int64_t layers, int64_t heads)
      : embed_(register_module("embed", posembed::InputEmbedding(input))),
        layers_(register_module("layers", torch::nn::ModuleList())) {
    for (int64_t i = 0; i < layers; ++i) {
      layers_->push_back(BertBlock(input.embedding_dim(), inner, heads));
    }
  }

  /// int64 ids [batch, seq] -> [batch, seq, width]
  torch::Tensor forward(const torch::Tensor& ids) {
    torch::Tensor x = embed_(ids);
    for (const auto& layer : *layers_) x = layer->as<BertBlock>()->forward(x);
    return x;
  }

 private:
  posembed::InputEmbedding embed_;
  torch::nn::ModuleList layers_;
};
TORCH_MODULE(Bert);

inline Bert load_bert(const std::string& path, int64_t heads) {
  const auto file = posembed::pretrained::open(path);
  const std::string prefix = has(file, "embeddings.word_embeddings.weight") ? "" : "bert.";
  const auto rows = [&](const std::string& table) {
    return file.shape(prefix + "embeddings." + table + "_embeddings.weight");
  };
  const auto inner = file.shape(prefix + "encoder.layer.0.intermediate.dense.bias");
  Bert model(posembed::InputOptions(rows("word")[0], rows("word")[1])
                 .max_positions(rows("position")[0])
                 .num_types(rows("token_type")[0])
                 .norm(posembed::InputNorm::layer)
                 .eps(1e-12),
             inner[0], count_layers(file, "layer."), heads);
  Words words = {{"embed", "embeddings"},
                 {"token", "word_embeddings"},
                 {"position", "position_embeddings"},
                 {"token_type", "token_type_embeddings"},
                 {"norm", "LayerNorm"},
                 {"layers", "encoder.layer"},
                 {"mixed", "attention.output.dense"},
                 {"attention_norm", "attention.output.LayerNorm"},
                 {"up", "intermediate.dense"},
                 {"down", "output.dense"},
                 {"feedforward_norm", "output.LayerNorm"}};
  const bool is_old = has(file, prefix + "embeddings.LayerNorm.gamma");
  const auto in_file = [&](const std::string& name) {
    const bool is_norm = name.find("norm") != std::string::npos;
    words["weight"] = is_old && is_norm ? "gamma" : "weight";
    words["bias"] = is_old && is_norm ? "beta" : "bias";
    std::vector<std::string> names;
    for (const char* part : {"query", "key", "value"}) {
      words["packed"] = std::string("attention.self.") + part;
      names.push_back(prefix + translated(name, words));
      if (name.find("packed") == std::string::npos) break;
    }
    return names;
  };
  load(*model, file, posembed::pretrained::LoadOptions().names_in_file(in_file));
  return model;
}

}  // namespace example
