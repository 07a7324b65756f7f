// Excludes shared memory from the comparison of blocks, because here it is static and the same for
// all blocks. These functions replace the sanitizer's functions that compiled code calls. Include
// it in one source file of a program.
#pragma once

#include "race_detector.h"

namespace cuda_on_cpu {

// Defined by the linker.
extern "C" char __bss_start, _end;

POSEMBED_UNOBSERVED inline bool shared_by_a_block(const void* address) {
  return address >= &__bss_start && address < &_end;
}

}  // namespace cuda_on_cpu

#define POSEMBED_COMPARE(access)                                       \
  extern "C" void __tsan_##access##_pc(void* address, void* caller);   \
  extern "C" POSEMBED_UNOBSERVED void __tsan_##access(void* address) { \
    if (cuda_on_cpu::shared_by_a_block(address)) return;               \
    __tsan_##access##_pc(address, __builtin_return_address(0));        \
  }

POSEMBED_COMPARE(read1)
POSEMBED_COMPARE(read2)
POSEMBED_COMPARE(read4)
POSEMBED_COMPARE(read8)
POSEMBED_COMPARE(read16)
POSEMBED_COMPARE(write1)
POSEMBED_COMPARE(write2)
POSEMBED_COMPARE(write4)
POSEMBED_COMPARE(write8)
POSEMBED_COMPARE(write16)
#undef POSEMBED_COMPARE

#define POSEMBED_COMPARE_RANGE(access)                                                      \
  extern "C" void __tsan_##access##_pc(void* address, unsigned long bytes, void* caller);   \
  extern "C" POSEMBED_UNOBSERVED void __tsan_##access(void* address, unsigned long bytes) { \
    if (cuda_on_cpu::shared_by_a_block(address)) return;                                    \
    __tsan_##access##_pc(address, bytes, __builtin_return_address(0));                      \
  }

POSEMBED_COMPARE_RANGE(read_range)
POSEMBED_COMPARE_RANGE(write_range)
#undef POSEMBED_COMPARE_RANGE
