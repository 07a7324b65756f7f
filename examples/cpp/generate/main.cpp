// Continues a text with a model of the Llama family, from its folder and without Python:
//
//     generate FOLDER "Once upon a time" 20
//
// The folder holds config.json, tokenizer.json (byte-level BPE) and model.safetensors or their
// index, as transformers' save_pretrained writes them, and positions.json, which
// `python -m posembed describe FOLDER > FOLDER/positions.json` writes. The likeliest token is taken
// each time.
#include <posembed/pretrained.h>
#include <posembed/rotary_specification.h>

#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "llama.h"
#include "tokenizer.h"

namespace generate {
namespace {

nlohmann::json read_json(const std::filesystem::path& path) {
  std::ifstream stream(path);
  if (!stream) throw std::runtime_error(path.string() + ": cannot be read");
  return nlohmann::json::parse(stream);
}

Llama load_model(const std::filesystem::path& folder) {
  std::vector<posembed::RotarySpec> of_layers;
  for (const auto& spec : posembed::RotarySpec::for_layers(folder)) {
    of_layers.push_back(spec.value());
  }
  Llama model(Sizes(read_json(folder / "config.json")), of_layers);
  model->eval();
  const auto index = folder / "model.safetensors.index.json";
  const auto file = posembed::pretrained::open(
      std::filesystem::exists(index) ? index : folder / "model.safetensors");
  posembed::pretrained::load_state(
      *model, file, posembed::pretrained::LoadOptions().name_in_file([](const std::string& name) {
        return name.rfind("lm_head", 0) == 0 ? name : "model." + name;
      }));
  return model;
}

void run(const std::filesystem::path& folder, const std::string& text, int count) {
  const torch::InferenceMode inference;
  const Tokenizer tokenizer(read_json(folder / "tokenizer.json"));
  Llama model = load_model(folder);
  std::vector<int64_t> ids = tokenizer.encode(text);
  std::cout << text;
  for (int i = 0; i < count; ++i) {
    const torch::Tensor logits = model(torch::tensor(ids).unsqueeze(0));
    ids = {logits.argmax().item<int64_t>()};
    std::cout << tokenizer.decode(ids[0]) << std::flush;
  }
  std::cout << '\n';
}

}  // namespace
}  // namespace generate

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: generate FOLDER TEXT COUNT\n";
    return 2;
  }
  try {
    generate::run(argv[1], argv[2], std::stoi(argv[3]));
  } catch (const c10::Error& error) {
    std::cerr << "generate: " << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "generate: " << error.what() << '\n';
    return 1;
  }
}
