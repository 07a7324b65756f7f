// Bags of ids. Forward: the sum, mean or maximum of a bag's rows in float32 (float64 for float64),
// rounded once. Backward: the token kernels sum the gradients of each id; each occurrence of
// an id contributes the gradient of its bag.
#pragma once

#include <cstdint>

#include "core/cuda_launch.h"
#include "core/index.h"
#include "core/instruction_set.h"
#include "core/lane_sum.h"
#include "core/scalar.h"

namespace posembed::bag {

/// Divides `ids` into bags: of `size` ids each, or from one offset to the next.
struct Bags {
  core::IndexView ids;      // [count]
  core::IndexView offsets;  // [bags], or [bags + 1] with the end of the last one
  int64_t count = 0;
  int64_t bags = 0;
  int64_t size = -1;         // of every bag; -1: bags begin at offsets
  int64_t padding_idx = -1;  // this id is left out; -1: none
  bool include_last_offset = false;
};

/// The ids with indices [begin, end).
struct Range {
  int64_t begin, end;
};

POSEMBED_INLINE Range range_of(const Bags& bags, int64_t bag) {
  if (bags.size >= 0) return {bag * bags.size, (bag + 1) * bags.size};
  const bool open = bag + 1 == bags.bags && !bags.include_last_offset;
  return {read(bags.offsets, bag), open ? bags.count : read(bags.offsets, bag + 1)};
}

/// The bag that contains ids[index]; -1: none.
POSEMBED_INLINE int64_t bag_of(const Bags& bags, int64_t index) {
  if (bags.size >= 0) return index / bags.size;
  int64_t low = 0, high = bags.bags;  // bags [0, low) begin at or before `index`
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (read(bags.offsets, middle) <= index) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low - 1;
}

using core::span;

enum class Mode : int8_t { sum, mean, max };

/// out[bag] = the sum, mean or elementwise maximum of the rows of its ids; zeros if it has none.
struct PoolArguments {
  const void* table = nullptr;     // [rows, embedding_dim], rows table_stride apart
  const void* weights = nullptr;   // [count]: factors of the rows of a sum; nullptr: ones
  void* out = nullptr;             // [bags, embedding_dim], contiguous
  int64_t* max_indices = nullptr;  // max: out [bags, embedding_dim], indices in `ids`; -1: none
  core::Scalar scalar = core::Scalar::float32;
  Mode mode = Mode::sum;
  int64_t rows = 0;
  int64_t embedding_dim = 0;
  int64_t table_stride = 0;
  Bags bags;
  core::DeviceError* error = nullptr;  // CUDA: where a bad id or offset is recorded
};

/// Pools bags [begin, end). Ids and offsets must have been checked.
POSEMBED_CPU_KERNEL(pool, void(const PoolArguments& arguments, int64_t begin, int64_t end));

/// Pools all bags. Ids outside the table are skipped and recorded. A bag with wrong offsets counts
/// as empty, and the offsets are recorded.
const char* pool_cuda(const PoolArguments& arguments, core::CudaStream stream);

/// out[index] = the bag that contains ids[index]; 0: none.
struct FindArguments {
  uint32_t* out = nullptr;  // [count]
  Bags bags;
};

/// Writes `out` for the ids [begin, end).
POSEMBED_CPU_KERNEL(find_bags, void(const FindArguments& arguments, int64_t begin, int64_t end));

const char* find_bags_cuda(const FindArguments& arguments, core::CudaStream stream);

/// out[index] = gradient[bag of ids[index]] where the maximum is of that id, zeros elsewhere.
struct SpreadArguments {
  const void* gradient = nullptr;        // [bags, embedding_dim], contiguous
  const int64_t* max_indices = nullptr;  // as in PoolArguments
  void* out = nullptr;                   // [count, embedding_dim], contiguous
  core::Scalar scalar = core::Scalar::float32;
  int64_t embedding_dim = 0;
  Bags bags;
};

/// Writes `out` for the ids [begin, end).
POSEMBED_CPU_KERNEL(spread, void(const SpreadArguments& arguments, int64_t begin, int64_t end));

const char* spread_cuda(const SpreadArguments& arguments, core::CudaStream stream);

/// out[index] = gradient[bag of ids[index]] · table[ids[index]]; 0 for padding.
struct DotArguments {
  const void* gradient = nullptr;  // [bags, embedding_dim], contiguous
  const void* table = nullptr;     // [rows, embedding_dim], rows table_stride apart
  void* out = nullptr;             // [count]
  core::Scalar scalar = core::Scalar::float32;
  int64_t rows = 0;
  int64_t embedding_dim = 0;
  int64_t table_stride = 0;
  Bags bags;
};

/// Computes `out` for the ids [begin, end). Ids and offsets must have been checked.
POSEMBED_CPU_KERNEL(dot, void(const DotArguments& arguments, int64_t begin, int64_t end));

/// Ids outside the table, which forward has recorded, give 0.
const char* dot_cuda(const DotArguments& arguments, core::CudaStream stream);

}  // namespace posembed::bag
