// A warp adds one piece of a token's row. In the batch sum each thread adds one vector of columns,
// or, of short sequences, a block loads them together. Both give the same bits.
#include "core/device_vector.h"
#include "core/divisor.h"
#include "learned/learned.h"

namespace posembed::learned {
namespace {

using core::Compute;
using core::divide_up;
using core::load;
using core::store;
using core::threads;
using core::Vector;
using core::warp_size;

constexpr int vectors_per_lane = 2;

/// The sum uses small blocks, which spread evenly over the multiprocessors.
constexpr int sum_threads = 2 * warp_size;

__device__ int64_t position_of(const AddArguments& a, int64_t batch, int64_t seq) {
  if (a.positions.data == nullptr) return a.offset + seq;
  return read(a.positions, batch * a.position_stride[0] + seq * a.position_stride[1]);
}

template <typename T, int width>
__global__ void __launch_bounds__(threads)
    add_kernel(AddArguments a, int64_t pieces, core::Divisor<int64_t> batches) {
  const auto [number, first_column] = core::item_of_lane<width>(pieces, vectors_per_lane);
  if (number >= a.batch * a.seq) return;
  // Tokens of one seq index are consecutive, so that the row of its position stays in the cache.
  const auto at = core::divide(number, batches);
  const int64_t seq = at.quotient, batch = at.remainder;
  const int64_t token = batch * a.seq + seq;
  const T* x = static_cast<const T*>(a.x) + batch * a.x_stride[0] + seq * a.x_stride[1];
  Vector<T, width> vectors[vectors_per_lane] = {};
#pragma unroll
  for (int i = 0; i < vectors_per_lane; ++i) {  // loads start before the position is known
    const int64_t column = first_column + i * warp_size * width;
    if (column < a.embedding_dim) {
      vectors[i] = *reinterpret_cast<const Vector<T, width>*>(x + column);
    }
  }
  const int64_t position = position_of(a, batch, seq);
  const auto row_number = static_cast<uint64_t>(position) + static_cast<uint64_t>(a.first_row);
  const bool valid = row_number < static_cast<uint64_t>(a.rows);
  if (!valid && first_column == 0) {
    record_error(a.error, core::ErrorKind::position, position, token, a.rows - a.first_row);
  }
  const T* row = static_cast<const T*>(a.weight) +
                 (valid ? static_cast<int64_t>(row_number) : 0) * a.weight_stride;
  T* out = static_cast<T*>(a.out) + token * a.embedding_dim;

  Vector<T, width> addends[vectors_per_lane] = {};
#pragma unroll
  for (int i = 0; i < vectors_per_lane; ++i) {  // no load waits for a store
    const int64_t column = first_column + i * warp_size * width;
    if (valid && column < a.embedding_dim) {
      addends[i] = *reinterpret_cast<const Vector<T, width>*>(row + column);
    }
  }
#pragma unroll
  for (int i = 0; i < vectors_per_lane; ++i) {
    const int64_t column = first_column + i * warp_size * width;
    if (column >= a.embedding_dim) continue;
    Compute<T> values[width], more[width];
    core::load_all(vectors[i].values, values);
    core::load_all(addends[i].values, more);
    Vector<T, width> sum = {};
#pragma unroll
    for (int k = 0; valid && k < width; ++k) store(values[k] + more[k], &sum.values[k]);
    core::write_vector<T, width>(sum, out + column);
  }
}

template <typename T, int width>
__global__ void __launch_bounds__(sum_threads) sum_kernel(SumArguments a) {
  const int64_t column = (int64_t{blockIdx.x} * sum_threads + threadIdx.x) * width;
  const int64_t columns = a.seq * a.embedding_dim;
  if (column >= columns) return;
  Compute<T> total[width] = {};
#pragma unroll 8
  for (int64_t batch = 0; batch < a.batch; ++batch) {
    const auto row = *reinterpret_cast<const Vector<T, width>*>(static_cast<const T*>(a.gradient) +
                                                                batch * columns + column);
    Compute<T> values[width];
    core::load_all(row.values, values);
#pragma unroll
    for (int k = 0; k < width; ++k) total[k] += values[k];
  }
  Vector<T, width> result;
#pragma unroll
  for (int k = 0; k < width; ++k) store(total[k], &result.values[k]);
  core::write_vector<T, width>(result, static_cast<T*>(a.out) + column);
}

/// The elements of the batch that a block of staged_sum_kernel copies together.
constexpr int stage_rows = 32;

// A block sums a warp's vectors of columns. All its warps copy rows, so that even few columns keep
// the memory busy; then a thread adds each column in the order of sum_kernel.
template <typename T, int width>
__global__ void __launch_bounds__(threads) staged_sum_kernel(SumArguments a) {
  constexpr int columns = warp_size * width;
  static_assert(columns <= threads);
  __shared__ Vector<T, width> stages[2][stage_rows][warp_size];
  const int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
  const int64_t all = a.seq * a.embedding_dim, first = int64_t{blockIdx.x} * columns;
  const T* from = static_cast<const T*>(a.gradient) + first + lane * width;
  const auto copy = [&](int64_t begin, int stage) {
    if (first + lane * width >= all) return;
#pragma unroll
    for (int row = warp; row < stage_rows; row += core::warps) {
      if (begin + row >= a.batch) continue;
      core::copy_async(reinterpret_cast<const Vector<T, width>*>(from + (begin + row) * all),
                       &stages[stage][row][lane]);
    }
  };
  Compute<T> total = 0;
  copy(0, 0);
  int stage = 0;
  for (int64_t begin = 0; begin < a.batch; begin += stage_rows, stage = 1 - stage) {
    core::wait_for_copies();
    __syncthreads();  // the copies are complete, and the other stage is no longer read
    copy(begin + stage_rows, 1 - stage);
    if (threadIdx.x >= columns) continue;
    const T* values = stages[stage][0][0].values + threadIdx.x;
    const int count = static_cast<int>(min(int64_t{stage_rows}, a.batch - begin));
#pragma unroll 16
    for (int row = 0; row < count; ++row) total += load(values[row * columns]);
  }
  const int64_t column = first + threadIdx.x;
  if (threadIdx.x < columns && column < all) store(total, static_cast<T*>(a.out) + column);
}

template <typename T, int width>
void launch_add(const AddArguments& a, cudaStream_t stream) {
  const int64_t pieces = divide_up(a.embedding_dim, vectors_per_lane * warp_size * width);
  core::launch(add_kernel<T, width>, core::blocks_for(a.batch * a.seq * pieces), threads, stream, a,
               pieces, core::Divisor<int64_t>::of(a.batch));
}

/// The minimum number of threads of sum_kernel that keeps a multiprocessor's share of the memory
/// busy.
constexpr int64_t busy_threads = 256;

template <typename T, int width>
void launch_sum(const SumArguments& a, cudaStream_t stream) {
  const int64_t vectors = divide_up(a.seq * a.embedding_dim, width);
  if (a.batch > core::warps && vectors < busy_threads * core::multiprocessors()) {
    core::launch(staged_sum_kernel<T, width>, divide_up(vectors, warp_size), threads, stream, a);
  } else {
    core::launch(sum_kernel<T, width>, divide_up(vectors, sum_threads), sum_threads, stream, a);
  }
}

/// The largest number of elements that can be read and written together.
template <typename T>
int64_t width_of(const AddArguments& a) {
  const int64_t dim = a.embedding_dim;
  return std::min(
      {core::width_of<T>(a.x, dim, a.x_stride[0]), core::width_of<T>(a.x, dim, a.x_stride[1]),
       core::width_of<T>(a.weight, dim, a.weight_stride), core::width_of<T>(a.out, dim, dim)});
}

}  // namespace

const char* add_cuda(const AddArguments& arguments, core::CudaStream stream) {
  if (arguments.batch == 0 || arguments.seq == 0 || arguments.embedding_dim == 0) return nullptr;
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    core::visit_width<T>(width_of<T>(arguments),
                         [&](auto width) { launch_add<T, width>(arguments, stream); });
  });
  return core::launch_error();
}

const char* sum_batch_cuda(const SumArguments& arguments, core::CudaStream stream) {
  if (arguments.seq == 0 || arguments.embedding_dim == 0) return nullptr;
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t columns = arguments.seq * arguments.embedding_dim;
    core::visit_width<T>(std::min(core::width_of<T>(arguments.gradient, columns, columns),
                                  core::width_of<T>(arguments.out, columns, columns)),
                         [&](auto width) { launch_sum<T, width>(arguments, stream); });
  });
  return core::launch_error();
}

}  // namespace posembed::learned
