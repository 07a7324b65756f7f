// Runs a language model that AOTInductor has compiled (examples/python/export_model.py), without
// Python: posembed's operators come from libposembed.so.
//
//     exported model.pt2 5 17 3    the likeliest token after 5, 17 and 3, and its logit
#include <posembed/posembed.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <exception>
#include <iostream>
#include <string>
#include <vector>

int main(int argc, char** argv) {
  if (argc < 4) {
    std::cerr << "usage: exported MODEL TOKEN TOKEN...\n";
    return 2;
  }
  try {
    std::vector<int64_t> tokens;
    for (int i = 2; i < argc; ++i) tokens.push_back(std::stoll(argv[i]));
    const torch::NoGradGuard no_grad;
    torch::inductor::AOTIModelPackageLoader model(argv[1]);
    const torch::Tensor logits = model.run({torch::tensor(tokens).unsqueeze(0)}).at(0);
    const auto [logit, token] = logits[0][-1].max(0);
    std::cout << token.item<int64_t>() << ' ' << logit.item<float>() << '\n';
  } catch (const std::exception& error) {
    std::cerr << "exported: " << error.what() << '\n';
    return 1;
  }
}
