// Which of the CPU kernels' instruction sets this process uses.
#pragma once

#include <cstdint>

namespace posembed::core {

enum class InstructionSet : int8_t { baseline, avx2, avx512 };

/// The widest set that was built, that the processor has, and that the environment variable
/// POSEMBED_INSTRUCTION_SET (baseline, avx2 or avx512) allows. Chosen once for the life of the
/// process.
InstructionSet instruction_set();

/// Whether rows that are not streamed are prefetched by software. Measured, rotating in place: a
/// seventh (float32) to a half (16-bit) less time on an Intel Xeon, up to a sixth more on an AMD
/// EPYC.
extern const bool prefetches_rows;

/// "baseline", "avx2" or "avx512".
const char* name(InstructionSet set);

}  // namespace posembed::core
