// Rotates query and key, normalised before if wanted, and writes key and value to a paged cache, in
// one pass over memory. Pages as in Kwon et al., "Efficient Memory Management for Large Language
// Model Serving with PagedAttention", 2023: a token's slot is page * page_size + index in the page.
#pragma once

#include <cstdint>

#include "core/cuda_launch.h"
#include "core/index.h"
#include "core/instruction_set.h"
#include "rotary/rotary.h"
#include "rotary_norm/rotary_norm.h"

namespace posembed::rotary_cache {

/// The cache of keys or of values: [pages, page_size, heads, dim] with a contiguous last dimension.
struct Cache {
  void* data = nullptr;
  int64_t stride[3] = {0, 0, 0};  // page, index in the page, head; in elements
  /// float8: the divisor of rows.
  float scale = 1.0f;
  const float* scale_data = nullptr;  // the scale on the data's device, instead of `scale`
};

struct Arguments {
  /// The norm of query and key; nullptr: none. Its rotation is this one.
  const rotary_norm::Arguments* norm = nullptr;
  /// Query and key. The key's `out` is null if the rotated key is written only to the cache.
  rotary::Arguments rotation;
  rotary::HeadView value;  // `out` is not used
  int64_t value_dim = 0;
  Cache key_cache, value_cache;
  bool float8 = false;              // the caches' type: float8 e4m3fn, or that of the data
  core::IndexView slots;            // -1: the token is not written
  int64_t slot_stride[2] = {0, 0};  // batch, seq; in elements
  int64_t page_size = 1;
  int64_t slot_count = 0;  // in all pages
};

/// The offset, in elements, of a slot in `cache`.
POSEMBED_INLINE int64_t slot_offset(const Cache& cache, int64_t slot, int64_t page_size) {
  return slot / page_size * cache.stride[0] + slot % page_size * cache.stride[1];
}

/// Processes tokens [begin, end) in the order of rotary's TokenOrder. Slots and positions must have
/// been checked.
POSEMBED_CPU_KERNEL(rotate_and_cache, void(const Arguments& arguments, int64_t begin, int64_t end));

/// Processes all tokens on `stream`. A slot outside the cache is recorded and its token is not
/// written.
const char* rotate_and_cache_cuda(const Arguments& arguments, core::CudaStream stream);

}  // namespace posembed::rotary_cache
