// Fills models of one's own from the files of GPT-2 and BERT:
//
//     gpt2_and_bert gpt2 FILE HEADS ID...    the likeliest token after these, and its logit
//     gpt2_and_bert bert FILE HEADS ID...    the first four numbers of the first token's vector
//
// FILE is model.safetensors, as transformers' save_pretrained writes it; sizes are those of its
// tensors. GPT-2 has heads of 64 components: 12 in the small model.
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "bert.h"
#include "gpt2.h"

namespace {

void run(const std::string& kind, const std::string& path, int64_t heads,
         const std::vector<int64_t>& ids) {
  const torch::InferenceMode inference;
  const torch::Tensor input = torch::tensor(ids).unsqueeze(0);
  if (kind == "gpt2") {
    const auto [logit, token] = example::load_gpt2(path, heads)(input)[0][-1].max(0);
    std::cout << token.item<int64_t>() << ' ' << logit.item<float>() << '\n';
    return;
  }
  const torch::Tensor first = example::load_bert(path, heads)(input)[0][0];
  for (int64_t i = 0; i < 4; ++i) std::cout << first[i].item<float>() << (i < 3 ? ' ' : '\n');
}

}  // namespace

int main(int argc, char** argv) {
  const std::string kind = argc > 4 ? argv[1] : "";
  if (kind != "gpt2" && kind != "bert") {
    std::cerr << "usage: gpt2_and_bert gpt2|bert FILE HEADS ID...\n";
    return 2;
  }
  try {
    std::vector<int64_t> ids;
    for (int i = 4; i < argc; ++i) ids.push_back(std::stoll(argv[i]));
    run(kind, argv[2], std::stoll(argv[3]), ids);
  } catch (const c10::Error& error) {
    std::cerr << "gpt2_and_bert: " << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "gpt2_and_bert: " << error.what() << '\n';
    return 1;
  }
}
