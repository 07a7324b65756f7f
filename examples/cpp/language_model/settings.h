// Options of the command line. The Python twin has the same options and defaults.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace language_model {

struct Settings {
  std::filesystem::path text;    // folder of .py files
  std::filesystem::path losses;  // where to write the loss of each step; empty: nowhere
  std::vector<std::string> methods = {"none", "learned", "sinusoidal", "rope", "alibi"};
  std::string device = "auto";
  int64_t seed = 0;

  int64_t layers = 2;
  int64_t width = 96;
  int64_t heads = 4;

  int64_t length = 64;  // bytes of a training window
  int64_t batch = 32;
  int64_t steps = 640;
  double learning_rate = 3e-3;
  int64_t held_out = 65536;  // bytes of held-out text
};

inline std::vector<std::string> split_at_commas(const std::string& list) {
  std::vector<std::string> words;
  std::istringstream stream(list);
  for (std::string word; std::getline(stream, word, ',');) words.push_back(word);
  return words;
}

inline Settings parse_settings(int argc, char** argv) {
  Settings settings;
  using Value = const std::string&;
  const std::map<std::string, std::function<void(Value)>> options = {
      {"--text", [&](Value value) { settings.text = value; }},
      {"--losses", [&](Value value) { settings.losses = value; }},
      {"--methods", [&](Value value) { settings.methods = split_at_commas(value); }},
      {"--device", [&](Value value) { settings.device = value; }},
      {"--seed", [&](Value value) { settings.seed = std::stoll(value); }},
      {"--length", [&](Value value) { settings.length = std::stoll(value); }},
      {"--batch", [&](Value value) { settings.batch = std::stoll(value); }},
      {"--steps", [&](Value value) { settings.steps = std::stoll(value); }},
      {"--held-out", [&](Value value) { settings.held_out = std::stoll(value); }},
  };
  std::string usage = "usage: language_model --text FOLDER, and any of";
  for (const auto& [name, read] : options) usage += " " + name;

  for (int i = 1; i < argc; i += 2) {
    const auto option = options.find(argv[i]);
    if (option == options.end() || i + 1 == argc) throw std::invalid_argument(usage);
    option->second(argv[i + 1]);
  }
  if (settings.text.empty()) throw std::invalid_argument(usage);
  return settings;
}

}  // namespace language_model
