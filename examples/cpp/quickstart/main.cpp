#include <posembed/posembed.h>

#include <iostream>

int main() {
  // As in BERT: token + position, normalised, in one kernel.
  posembed::InputEmbedding embed(posembed::InputOptions(30522, 768)
                                     .positions(posembed::Positions::learned)
                                     .max_positions(512)
                                     .norm(posembed::InputNorm::layer));
  const torch::Tensor hidden = embed->forward(torch::randint(30522, {2, 128}));

  // As in Llama: query and key, rotated in one kernel where they lie in one projection.
  posembed::RotaryEmbedding rope(posembed::RotaryOptions(128).base(500000.0));
  const torch::Tensor packed = torch::randn({2, 128, 32 + 8 + 8, 128}).requires_grad_();
  const auto [query, key] = rope->forward(packed.slice(2, 0, 32), packed.slice(2, 32, 40));

  (hidden.sum() + query.sum() + key.sum()).backward();
  std::cout << hidden.sizes() << ' ' << query.sizes() << ' ' << key.sizes() << '\n';
}
