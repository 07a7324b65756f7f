// Stores of vectors in device code as one instruction. The compiler sometimes splits such a store
// into four or eight, which wastes memory bandwidth.
#pragma once

#include <cstring>
#include <type_traits>

#include "core/device_vector.h"

namespace posembed::core {

#if defined(__NVCC__)
__device__ inline void write_word(const uint4& word, uint4* out) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(out)),
               "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
}

__device__ inline void write_word(const uint2& word, uint2* out) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(out)), "r"(word.x),
               "r"(word.y)
               : "memory");
}

__device__ inline void write_word(uint32_t word, uint32_t* out) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(out)), "r"(word)
               : "memory");
}
#else
template <typename Word>
void write_word(const Word& word, Word* out) {
  *out = word;
}
#endif

/// Writes to global memory.
template <typename T, int width>
__device__ void write_vector(const Vector<T, width>& vector, T* out) {
  if constexpr (width == 1) {
    *out = vector.values[0];
  } else {
    using Part = std::conditional_t<sizeof(vector) % sizeof(uint2) == 0, uint2, uint32_t>;
    using Word = std::conditional_t<sizeof(vector) % sizeof(uint4) == 0, uint4, Part>;
    constexpr int count = static_cast<int>(sizeof(vector) / sizeof(Word));
    Word words[count];
    memcpy(words, vector.values, sizeof(vector));
#pragma unroll
    for (int i = 0; i < count; ++i) write_word(words[i], reinterpret_cast<Word*>(out) + i);
  }
}

}  // namespace posembed::core
