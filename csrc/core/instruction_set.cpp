#include "core/instruction_set.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>

namespace posembed::core {
namespace {

InstructionSet of_processor() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512) return InstructionSet::avx512;
  if (avx2) return InstructionSet::avx2;
#endif
  return InstructionSet::baseline;
}

bool find_intel() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("intel") != 0;
#else
  return false;
#endif
}

/// The widest set that was built and that this processor can run.
InstructionSet widest_here() {
  const InstructionSet limit = of_processor();
  InstructionSet widest = InstructionSet::none;
  for (const InstructionSet set : built_instruction_sets()) {
    if (set <= limit) widest = set;
  }
  return widest;
}

std::optional<InstructionSet> named(const char* text) {
  for (const InstructionSet set : built_instruction_sets()) {
    if (std::strcmp(text, name(set)) == 0) return set;
  }
  return std::nullopt;
}

InstructionSet choose() {
  const InstructionSet widest = widest_here();
  const char* wanted = std::getenv("POSEMBED_INSTRUCTION_SET");
  if (wanted == nullptr) return widest;
  if (const auto set = named(wanted)) return std::min(*set, widest);
  std::string built;
  for (const InstructionSet set : built_instruction_sets()) {
    built += (built.empty() ? "" : ", ") + std::string(name(set));
  }
  std::fprintf(stderr,
               "posembed: POSEMBED_INSTRUCTION_SET: expected one of those built (%s), got '%s'; "
               "taken as %s\n",
               built.c_str(), wanted, name(widest));
  return widest;
}

}  // namespace

const bool is_intel = find_intel();

std::vector<InstructionSet> built_instruction_sets() { return {POSEMBED_BUILT_SETS}; }

InstructionSet instruction_set() {
  static const InstructionSet chosen = choose();
  return chosen;
}

void refuse_processor() {
  throw std::runtime_error(
      std::string("posembed: its CPU kernels need ") + name(built_instruction_sets().front()) +
      ", which this processor lacks; build posembed with POSEMBED_INSTRUCTION_SETS=all");
}

const char* name(InstructionSet set) {
  switch (set) {
    case InstructionSet::avx512:
      return "avx512";
    case InstructionSet::avx2:
      return "avx2";
    case InstructionSet::baseline:
      return "baseline";
    default:
      return "none";
  }
}

}  // namespace posembed::core
