// Views of int32 or int64 ids and positions. Kernels convert them as they read, without a copy. The
// first one outside a table is found before anything is written.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/macros.h"

namespace posembed::core {

enum class Index : int8_t { int32, int64 };

/// A view of integers of either width.
struct IndexView {
  const void* data = nullptr;
  Index type = Index::int64;
};

POSEMBED_INLINE int64_t read(const IndexView& view, int64_t index) {
  return view.type == Index::int32 ? static_cast<const int32_t*>(view.data)[index]
                                   : static_cast<const int64_t*>(view.data)[index];
}

template <typename T>
inline int64_t find_outside(const T* values, int64_t count, int64_t low, int64_t limit) {
  // Whole blocks are tested without a branch, so the loop vectorises; only a block that fails is
  // searched.
  constexpr int64_t block = 512;
  const uint64_t width = static_cast<uint64_t>(limit) - static_cast<uint64_t>(low);
  const auto outside = [&](T value) {
    return static_cast<uint64_t>(int64_t{value}) - static_cast<uint64_t>(low) >= width;
  };
  for (int64_t begin = 0; begin < count; begin += block) {
    const int64_t end = std::min(begin + block, count);
    bool any = false;
    for (int64_t i = begin; i < end; ++i) any |= outside(values[i]);
    if (!any) continue;
    return std::find_if(values + begin, values + end, outside) - values;
  }
  return -1;
}

/// The index of the first of `count` values outside [low, limit), or -1. Expects low <= limit.
inline int64_t find_outside(const IndexView& view, int64_t count, int64_t low, int64_t limit) {
  return view.type == Index::int32
             ? find_outside(static_cast<const int32_t*>(view.data), count, low, limit)
             : find_outside(static_cast<const int64_t*>(view.data), count, low, limit);
}

}  // namespace posembed::core
