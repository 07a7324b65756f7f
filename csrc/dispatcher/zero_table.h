// Memory for tables of which most rows stay zero. Pages fresh from the system hold zeros already,
// and cost a fault each when they are first written: there, only rows that are not zero are worth
// writing. Memory that the allocator hands out again is the other way round: cheap to write, and
// full of old values.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

#include "core/stream_bytes.h"

namespace posembed::dispatcher {

struct ZeroTable {
  at::Tensor tensor;
  bool is_zero;  // if not, it holds anything
};

/// Whether the page of `data` has been used. Only a hint: it may be lost or gained at any time.
inline bool is_resident(const void* data) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  unsigned char resident = 1;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data) / page * page;
  mincore(reinterpret_cast<void*>(begin), page, &resident);
  return (resident & 1) != 0;
}

/// calloc knows which memory is fresh, and writes zeros into the rest.
inline at::Tensor calloc_tensor(at::IntArrayRef sizes, const at::TensorOptions& options,
                                size_t bytes) {
  constexpr size_t alignment = 64;  // torch's own
  // Once freed, the block shall have room for a tensor of this size from torch, with what malloc
  // needs to align it: otherwise the two would never use each other's memory again.
  constexpr size_t slack = 512;
  void* block = std::calloc(1, bytes + slack);
  TORCH_CHECK(block != nullptr, "posembed: not enough memory for ", bytes, " bytes");
  void* data = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(block) + alignment - 1) /
                                       alignment * alignment);
  return at::for_blob(data, sizes)
      .context(block, std::free)
      .allocator(c10::GetCPUAllocator())
      .resizeable_storage()
      .options(options)
      .make_tensor();
}

/// A contiguous CPU tensor; zeros where they come for nothing.
inline ZeroTable allocate_zero_table(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor plain = at::empty(sizes, options);
  const size_t bytes = plain.nbytes();
  const char* data = static_cast<const char*>(plain.const_data_ptr());
  if (static_cast<int64_t>(bytes) < core::stream_bytes || is_resident(data + bytes / 2)) {
    return {plain, false};
  }
  plain.reset();
  return {calloc_tensor(sizes, options, bytes), true};
}

}  // namespace posembed::dispatcher
