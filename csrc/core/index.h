// Views of int32 or int64 ids and positions. Kernels convert them as they read, without a copy.
#pragma once

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

}  // namespace posembed::core
