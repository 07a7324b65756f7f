// The copies of kernels, one per instruction set, that this processor can run.
#pragma once

#include "core/instruction_set.h"

#define POSEMBED_ADD_COPY(result, set, ...)                   \
  if (core::instruction_set() >= core::InstructionSet::set) { \
    namespace isa = set;                                      \
    result.push_back({#set, __VA_ARGS__});                    \
  }

// POSEMBED_ADD_COPIES(result, isa::rotate) adds {"baseline", baseline::rotate} and so on to a
// vector.
#define POSEMBED_ADD_COPIES(result, ...)           \
  POSEMBED_ADD_COPY(result, baseline, __VA_ARGS__) \
  POSEMBED_ADD_COPY(result, avx2, __VA_ARGS__)     \
  POSEMBED_ADD_COPY(result, avx512, __VA_ARGS__)
