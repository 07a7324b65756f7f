// Rotates with the C++ module and undoes the rotation.
#include <posembed/build_info.h>
#include <posembed/rotary.h>

#include <iostream>

int main() {
  posembed::RotaryEmbedding rope(posembed::RotaryOptions(64));
  const torch::Tensor query = torch::linspace(-1, 1, 2 * 5 * 3 * 64).view({2, 5, 3, 64});
  const torch::Tensor rotated = rope->forward(query);
  const torch::Tensor restored = rope->forward(rotated, posembed::RotaryCall().inverse(true));

  const bool moved = (rotated - query).abs().max().item<float>() > 0.01f;
  const bool returned = (restored - query).abs().max().item<float>() < 1e-6f;
  std::cout << "posembed " << posembed::build_info().version << (moved ? " rotated" : " did nothing")
            << (returned ? " and restored\n" : " and lost\n");
  return moved && returned ? 0 : 1;
}
