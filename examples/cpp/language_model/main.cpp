// Trains one small byte-level language model per position method on real text, then reads held-out
// text in windows of 1, 2 and 4 times the trained length. The losses show how methods extrapolate.
// After Press et al., "Train Short, Test Long", arXiv:2108.12409.
#include <posembed/build_info.h>
#include <torch/cuda.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <iomanip>
#include <iostream>

#include "training.h"

namespace language_model {
namespace {

torch::Device choose_device(const std::string& name) {
  if (name != "auto") return torch::Device(name);
  const bool cuda = torch::cuda::is_available() && !posembed::build_info().cuda_version.empty();
  return cuda ? torch::kCUDA : torch::kCPU;
}

Decoder trained_model(const std::string& method, const torch::Tensor& ids, const Settings& settings,
                      std::ostream& losses) {
  Decoder model(method, settings);
  model->to(ids.device());
  const auto start = std::chrono::steady_clock::now();
  const auto history = train(model, ids, settings);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::fprintf(stderr, "%-10s  %ld steps in %.0f s, loss %.3f -> %.3f\n", method.c_str(),
               settings.steps, seconds.count(), history.front(), history.back());
  for (size_t step = 0; step < history.size(); ++step) {
    losses << method << ',' << step << ',' << history[step] << '\n';
  }
  return model;
}

void print_row(Decoder& model, const std::string& method, const torch::Tensor& ids,
               int64_t trained) {
  std::printf("%-10s", method.c_str());
  for (const int64_t factor : {1, 2, 4}) {
    const bool past_table = method == "learned" && factor > 1;
    if (past_table) {
      std::printf("%10s", "n/a");
    } else {
      std::printf("%10.3f", evaluate(model, ids, factor * trained));
    }
  }
  std::printf("\n");
}

void run(const Settings& settings) {
  const int64_t training_bytes = settings.batch * settings.steps * settings.length;
  const auto device = choose_device(settings.device);
  // The last byte of either part is only ever a target.
  const auto ids = read_bytes(settings.text, training_bytes + 1 + settings.held_out + 1).to(device);
  const auto training = ids.narrow(0, 0, training_bytes + 1);
  const auto held_out = ids.narrow(0, training_bytes + 1, settings.held_out + 1);

  std::ofstream losses(settings.losses);  // without a file name: writes nothing
  losses << std::setprecision(9) << "method,step,loss\n";
  std::vector<Decoder> models;
  for (const auto& method : settings.methods) {
    models.push_back(trained_model(method, training, settings, losses));
  }

  std::printf("Loss in nats per byte on %ld held-out bytes, read in windows of\n%10s",
              settings.held_out, "");
  for (const int64_t factor : {1, 2, 4}) std::printf("%10ld", factor * settings.length);
  std::printf("\n");
  for (size_t i = 0; i < models.size(); ++i) {
    print_row(models[i], settings.methods[i], held_out, settings.length);
  }
}

}  // namespace
}  // namespace language_model

int main(int argc, char** argv) {
  try {
    language_model::run(language_model::parse_settings(argc, argv));
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
