// A thread gathers one logit. A warp sums the keys of one query: it adds runs of equal rows first,
// then the runs of a row one after another, so that the order of additions is fixed. By key, a
// thread sums the queries of one key.
#include "core/device_vector.h"
#include "core/divisor.h"
#include "relative_logits/relative_logits.h"

namespace posembed::relative_logits {
namespace {

using core::Compute;
using core::divide_up;
using core::load;
using core::store;
using core::threads;
using core::warp_size;

constexpr unsigned full_mask = 0xffffffffu;

struct Sizes {
  core::Divisor<int64_t> keys, queries, heads;
};

/// Where a line of keys begins in rows, scores, products and the result.
struct Line {
  int64_t rows, scores, out, number;
};

__device__ int64_t offset(const int64_t* stride, int64_t batch, int64_t head, int64_t query) {
  return batch * stride[0] + head * stride[1] + query * stride[2];
}

__device__ Line line_at(const Block& b, const Sizes& sizes, int64_t number) {
  const auto plane = core::divide(number, sizes.queries);
  const auto sample = core::divide(plane.quotient, sizes.heads);
  const int64_t batch = sample.quotient, head = sample.remainder, query = plane.remainder;
  return {batch * b.row_stride[1] + query * b.row_stride[2],
          offset(b.score_stride, batch, head, query), offset(b.out_stride, batch, head, query),
          number};
}

/// The index of a row's product, or -1 for rows without one; records rows outside the table.
__device__ int64_t product_of(const Block& b, int64_t at) {
  const int32_t row = b.rows[at];
  const int64_t index = row - b.first_row;
  if (row < hidden_row || (row >= 0 && (index < 0 || index >= b.row_count))) {
    record_error(b.error, core::ErrorKind::position, row, at, b.row_count);
    return -1;
  }
  return row < 0 ? -1 : index;
}

template <typename T>
__global__ void __launch_bounds__(threads) gather_kernel(Block b, Sizes sizes) {
  const auto at = core::divide(int64_t{blockIdx.x} * threads + threadIdx.x, sizes.keys);
  if (at.quotient >= b.batch * b.heads * b.queries) return;
  const Line line = line_at(b, sizes, at.quotient);
  const int64_t key = at.remainder;
  const int64_t plane = core::divide(at.quotient, sizes.queries).quotient;
  const int64_t place = b.by_key ? plane * b.keys + key : at.quotient;
  const auto* products = static_cast<const Compute<T>*>(b.products) + place * b.row_count;
  const auto scale = static_cast<Compute<T>>(b.scale);
  Compute<T> sum = b.scores == nullptr ? Compute<T>(0)
                                       : load(static_cast<const T*>(b.scores)[line.scores + key]);
  for (int64_t axis = 0; axis < b.axes; ++axis) {
    const int64_t row = axis * b.row_stride[0] + line.rows + key;
    const int64_t index = product_of(b, row);
    if (index >= 0) {
      sum += scale * products[index];
    } else if (b.rows[row] == hidden_row) {
      sum = -static_cast<Compute<T>>(INFINITY);
    }
  }
  store(sum, static_cast<T*>(b.out) + line.out + key);
}

/// Adds the lanes' values to the sums of their rows; lanes without a row have -1.
template <typename C>
__device__ void add_lanes(int row, C value, C* sums) {
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  const int before = __shfl_sync(full_mask, row, lane == 0 ? 0 : lane - 1);
  const unsigned heads = __ballot_sync(full_mask, lane == 0 || before != row);
  const int start = 31 - __clz(static_cast<int>(heads & full_mask >> (warp_size - 1 - lane)));
#pragma unroll
  for (int step = 1; step < warp_size; step *= 2) {
    const C other = __shfl_sync(full_mask, value, lane < step ? lane : lane - step);
    if (lane - step >= start) value += other;
  }
  // The last lane of a run has its sum. Runs of one row are added in the order of keys.
  const bool adds = row >= 0 && (lane == warp_size - 1 || (heads >> (lane + 1) & 1) != 0);
  const unsigned peers = __match_any_sync(full_mask, adds ? row : -1 - lane);
  const int rank = __popc(peers & ((1u << lane) - 1));
  for (int round = 0; __ballot_sync(full_mask, adds && rank >= round) != 0; ++round) {
    if (adds && rank == round) sums[row] += value;
    __syncwarp();
  }
}

template <typename T>
__global__ void __launch_bounds__(threads) scatter_kernel(Block b, Sizes sizes) {
  const int64_t number = int64_t{blockIdx.x} * core::warps + threadIdx.x / warp_size;
  if (number >= b.batch * b.heads * b.queries) return;
  const Line line = line_at(b, sizes, number);
  const auto scale = static_cast<Compute<T>>(b.scale);
  Compute<T>* sums = static_cast<Compute<T>*>(b.products) + number * b.row_count;
  const T* scores = static_cast<const T*>(b.scores) + line.scores;
  for (int64_t axis = 0; axis < b.axes; ++axis) {
    for (int64_t first = 0; first < b.keys; first += warp_size) {
      const int64_t key = first + threadIdx.x % warp_size;
      const bool valid = key < b.keys;
      const int64_t row = valid ? product_of(b, axis * b.row_stride[0] + line.rows + key) : -1;
      const Compute<T> value = row >= 0 ? load(scores[key]) * scale : Compute<T>(0);
      add_lanes(static_cast<int>(row), value, sums);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(threads) scatter_by_key_kernel(Block b, Sizes sizes) {
  const int64_t number = int64_t{blockIdx.x} * threads + threadIdx.x;
  const auto at = core::divide(number, sizes.keys);
  if (at.quotient >= b.batch * b.heads) return;
  const auto scale = static_cast<Compute<T>>(b.scale);
  Compute<T>* sums = static_cast<Compute<T>*>(b.products) + number * b.row_count;
  for (int64_t axis = 0; axis < b.axes; ++axis) {
    for (int64_t query = 0; query < b.queries; ++query) {
      const Line line = line_at(b, sizes, at.quotient * b.queries + query);
      const int64_t row = product_of(b, axis * b.row_stride[0] + line.rows + at.remainder);
      if (row < 0) continue;
      sums[row] += load(static_cast<const T*>(b.scores)[line.scores + at.remainder]) * scale;
    }
  }
}

Sizes sizes_of(const Block& b) {
  return {core::Divisor<int64_t>::of(b.keys), core::Divisor<int64_t>::of(b.queries),
          core::Divisor<int64_t>::of(b.heads)};
}

bool is_empty(const Block& b) { return b.batch * b.heads * b.queries * b.keys == 0; }

}  // namespace

const char* gather_cuda(const Block& block, core::CudaStream stream) {
  if (is_empty(block)) return nullptr;
  const int64_t count = block.batch * block.heads * block.queries * block.keys;
  core::visit_scalar(block.scalar, [&](auto tag) {
    core::launch(gather_kernel<typename decltype(tag)::type>, divide_up(count, threads), threads,
                 stream, block, sizes_of(block));
  });
  return core::launch_error();
}

const char* scatter_cuda(const Block& block, core::CudaStream stream) {
  if (is_empty(block)) return nullptr;
  const int64_t planes = block.batch * block.heads;
  core::visit_scalar(block.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (block.by_key) {
      core::launch(scatter_by_key_kernel<T>, divide_up(planes * block.keys, threads), threads,
                   stream, block, sizes_of(block));
    } else {
      core::launch(scatter_kernel<T>, core::blocks_for(planes * block.queries), threads, stream,
                   block, sizes_of(block));
    }
  });
  return core::launch_error();
}

}  // namespace posembed::relative_logits
