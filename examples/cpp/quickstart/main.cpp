#include <posembed/posembed.h>

#include <iostream>

int main() {
  posembed::InputEmbedding embed(posembed::InputOptions(30522, 768)
                                     .positions(posembed::Positions::learned)
                                     .max_positions(512));
  posembed::RotaryEmbedding rope(posembed::RotaryOptions(64).base(500000.0));
  const torch::Tensor ids = torch::randint(30522, {2, 128});
  const torch::Tensor heads = embed->forward(ids).view({2, 128, 12, 64});
  const auto [query, key] = rope->forward(heads, heads.slice(2, 0, 4));
  (query.sum() + key.sum()).backward();
  std::cout << query.sizes() << ' ' << key.sizes() << '\n';
}
