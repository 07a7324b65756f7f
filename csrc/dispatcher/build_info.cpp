#include "posembed/build_info.h"

#include <sstream>

#include "core/instruction_set.h"
#include "dispatcher/build_facts.h"

namespace posembed {
namespace {

std::vector<std::string> split(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

}  // namespace

BuildInfo build_info() {
  BuildInfo info;
  info.version = POSEMBED_VERSION;
  info.torch_version = POSEMBED_TORCH_VERSION;
  info.cuda_version = POSEMBED_CUDA_VERSION;
  info.cuda_architectures = split(POSEMBED_CUDA_ARCHITECTURES);
  info.compiler = POSEMBED_COMPILER;
  for (const auto set : core::built_instruction_sets()) {
    info.instruction_sets.emplace_back(core::name(set));
  }
  info.instruction_set = core::name(core::instruction_set());
  return info;
}

}  // namespace posembed
