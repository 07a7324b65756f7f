#include "core/instruction_set.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace posembed::core {
namespace {

InstructionSet of_processor() {
#if defined(POSEMBED_X86_VARIANTS)
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
#if defined(POSEMBED_X86_VARIANTS)
  __builtin_cpu_init();
  return __builtin_cpu_is("intel") != 0;
#else
  return false;
#endif
}

InstructionSet choose() {
  const InstructionSet widest = of_processor();
  const char* wanted = std::getenv("POSEMBED_INSTRUCTION_SET");
  if (wanted == nullptr) return widest;
  for (const InstructionSet set :
       {InstructionSet::baseline, InstructionSet::avx2, InstructionSet::avx512}) {
    if (std::strcmp(wanted, name(set)) == 0) return std::min(set, widest);
  }
  std::fprintf(stderr,
               "posembed: POSEMBED_INSTRUCTION_SET: expected baseline, avx2 or avx512, got '%s'; "
               "taken as %s\n",
               wanted, name(widest));
  return widest;
}

}  // namespace

const bool is_intel = find_intel();

InstructionSet instruction_set() {
  static const InstructionSet chosen = choose();
  return chosen;
}

const char* name(InstructionSet set) {
  switch (set) {
    case InstructionSet::avx512:
      return "avx512";
    case InstructionSet::avx2:
      return "avx2";
    default:
      return "baseline";
  }
}

}  // namespace posembed::core
