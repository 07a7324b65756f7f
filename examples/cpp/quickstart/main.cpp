#include <posembed/posembed.h>

#include <iostream>

int main() {
  // BERT's input: token + position, normalised, in one kernel.
  auto options = posembed::InputOptions(30522, 768).max_positions(512);
  posembed::InputEmbedding embed(options.norm(posembed::InputNorm::layer));
  const torch::Tensor hidden = embed->forward(torch::randint(30522, {2, 128}));
  hidden.sum().backward();

  // Llama's RoPE: query and key in one kernel.
  posembed::RotaryEmbedding rope(posembed::RotaryOptions(128).base(500000.0));
  const torch::Tensor query = torch::randn({2, 128, 32, 128});
  const torch::Tensor key = torch::randn({2, 128, 8, 128});
  const auto [q, k] = rope->forward(query, key);
  std::cout << hidden.sizes() << ' ' << q.sizes() << ' ' << k.sizes() << '\n';
}
