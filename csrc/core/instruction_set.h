// Which of the CPU kernels' instruction sets this process uses.
#pragma once

#include <cstdint>
#include <vector>

namespace posembed::core {

enum class InstructionSet : int8_t { baseline, avx2, avx512 };

/// The sets that were built, narrowest first.
std::vector<InstructionSet> built_instruction_sets();

/// The widest set that was built, that the processor has, and that the environment variable
/// POSEMBED_INSTRUCTION_SET (baseline, avx2 or avx512) allows. Chosen once for the life of the
/// process.
InstructionSet instruction_set();

/// Whether the processor is Intel's. Its prefetchers want memory to be walked in another order than
/// AMD's do, and gain from software prefetch where those lose.
extern const bool is_intel;

/// "baseline", "avx2" or "avx512".
const char* name(InstructionSet set);

}  // namespace posembed::core
