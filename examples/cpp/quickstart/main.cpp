#include <posembed/posembed.h>

#include <iostream>

int main() {
  // BERT's input: token + position, normalised, in one kernel.
  posembed::InputEmbedding embed(
      posembed::InputOptions(30522, 768).max_positions(512).norm(posembed::InputNorm::layer));
  const torch::Tensor hidden = embed->forward(torch::randint(30522, {2, 128}));
  hidden.sum().backward();

  // Llama's RoPE: query and key in one kernel.
  posembed::RotaryEmbedding rope(posembed::RotaryOptions(128).base(500000.0));
  const auto [query, key] =
      rope->forward(torch::randn({2, 128, 32, 128}), torch::randn({2, 128, 8, 128}));
  std::cout << hidden.sizes() << ' ' << query.sizes() << ' ' << key.sizes() << '\n';
}
