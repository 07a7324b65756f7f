// Names of a model's tensors in its file, and attention, for both models.
#pragma once

#include <posembed/pretrained.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/utils.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>

namespace example {

using Words = std::map<std::string, std::string>;

/// A name whose words, between dots, are translated; an empty translation leaves the word out.
inline std::string translated(const std::string& name, const Words& words) {
  std::istringstream stream(name);
  std::string result;
  for (std::string word; std::getline(stream, word, '.');) {
    const auto found = words.find(word);
    if (found != words.end()) word = found->second;
    if (!word.empty()) result += (result.empty() ? "" : ".") + word;
  }
  return result;
}

/// The layers of a file: "h.11." is in the twelfth.
inline int64_t count_layers(const posembed::pretrained::VectorFile& file, const std::string& word) {
  int64_t count = 0;
  for (const std::string& name : file.names()) {
    const size_t at = name.find(word);
    if (at != std::string::npos) {
      count = std::max<int64_t>(count, std::stoll(name.substr(at + word.size())) + 1);
    }
  }
  return count;
}

inline bool has(const posembed::pretrained::VectorFile& file, const std::string& name) {
  const auto names = file.names();
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// Fills a module. Files also hold what it has no use for, such as masks and BERT's heads.
inline void load(torch::nn::Module& module, const posembed::pretrained::VectorFile& file,
                 posembed::pretrained::LoadOptions options) {
  const auto unmatched = posembed::pretrained::load_state(module, file, options.strict(false));
  if (!unmatched.missing.empty()) {
    throw std::runtime_error(file.path() + " has no " + unmatched.missing[0]);
  }
  module.eval();
}

/// [batch, seq, width] each -> [batch, seq, width]
inline torch::Tensor attend(const torch::Tensor& query, const torch::Tensor& key,
                            const torch::Tensor& value, int64_t heads, bool causal) {
  const auto split = [&](const torch::Tensor& x) {
    return x.unflatten(-1, {heads, -1}).transpose(1, 2);
  };
  return torch::scaled_dot_product_attention(split(query), split(key), split(value), {}, 0.0,
                                             causal)
      .transpose(1, 2)
      .flatten(2);
}

inline torch::nn::LayerNorm layer_norm(int64_t width, double eps) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}).eps(eps));
}

}  // namespace example
