// Reads what a model's folder says about positions, without Python: its positions.json, which
//
//     python -m posembed describe FOLDER > FOLDER/positions.json
//
// has written once.
//
//     checkpoint input bert-base-uncased    the input layer: tables and norm, ready to run
//     checkpoint rotary Llama-3.1-8B        how each layer rotates query and key
#include <posembed/posembed.h>

#include <exception>
#include <iostream>
#include <string>

namespace {

void show_input(const std::string& folder) {
  const auto positions = posembed::ModelPositions::read(folder);
  posembed::InputEmbedding embed =
      posembed::InputEmbedding::from_positions(positions, folder + "/model.safetensors");
  const torch::Tensor ids = torch::randint(embed->options.num_embeddings(), {2, 8});
  std::cout << embed << '\n' << ids.sizes() << " -> " << embed->forward(ids).sizes() << '\n';
}

void show_rotary(const std::string& folder) {
  const auto layers = posembed::RotarySpec::for_layers(folder);
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    std::cout << "layer " << layer << ": "
              << (layers[layer].has_value() ? layers[layer]->describe() : "not rotated") << '\n';
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc == 3 ? argv[1] : "";
  if (what != "input" && what != "rotary") {
    std::cerr << "usage: checkpoint input|rotary FOLDER\n";
    return 2;
  }
  try {
    what == "input" ? show_input(argv[2]) : show_rotary(argv[2]);
  } catch (const c10::Error& error) {
    std::cerr << "checkpoint: " << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "checkpoint: " << error.what() << '\n';
    return 1;
  }
}
