// A vector of elements as 32-bit words, in device code.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/device_vector.h"

namespace posembed::core {

/// A vector of `width` elements, initially zeros. It is declared as 32-bit registers, because a
/// conditional load of 16-bit elements would be assembled from single elements.
template <typename T, int width>
struct Words {
  static constexpr bool whole = sizeof(T) * width % sizeof(uint32_t) == 0;
  using Word = std::conditional_t<whole, uint32_t, T>;
  Vector<Word, sizeof(T) * width / sizeof(Word)> words = {};

  __device__ void read(const T* from) { words = *reinterpret_cast<const decltype(words)*>(from); }
  __device__ void load(Compute<T> (&wide)[width]) const {
    T values[width];
    memcpy(values, &words, sizeof words);
    load_all(values, wide);
  }
};

}  // namespace posembed::core
