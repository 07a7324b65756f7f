// Chooses the instruction set of the CPU kernels for this process.
#pragma once

#include <cstdint>
#include <vector>

namespace posembed::core {

enum class InstructionSet : int8_t { none, baseline, avx2, avx512 };

/// The sets that were built, narrowest first.
std::vector<InstructionSet> built_instruction_sets();

/// The widest set that was built, that the processor has, and that the environment variable
/// POSEMBED_INSTRUCTION_SET (baseline, avx2 or avx512) allows; none if the processor has none of
/// those built. Chosen once per process, while the library is loaded.
InstructionSet instruction_set();

/// Throws std::runtime_error, for kernels of which no copy runs on this processor.
[[noreturn]] void refuse_processor();

/// Whether the processor is Intel's. Intel's and AMD's prefetchers favour different orders of
/// memory accesses, and software prefetch helps the former but hurts the latter.
extern const bool is_intel;

/// "none", "baseline", "avx2" or "avx512".
const char* name(InstructionSet set);

}  // namespace posembed::core
