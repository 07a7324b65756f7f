// A warp adds one piece of a token's row. In the batch sum each thread adds one vector of columns.
#include "core/device_item.h"
#include "core/device_store.h"
#include "core/divisor.h"
#include "learned/kernel.h"

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

__device__ int64_t position_of(const AddArguments& a, int64_t batch, int64_t place) {
  if (a.positions.data == nullptr) return a.offset + place;
  return read(a.positions, batch * a.position_stride[0] + place * a.position_stride[1]);
}

template <typename T, int width>
__global__ void __launch_bounds__(threads)
    add_kernel(AddArguments a, int64_t pieces, core::Divisor<int64_t> batches) {
  const auto [number, first_column] = core::item_of_lane<width>(pieces, vectors_per_lane);
  if (number >= a.batch * a.seq) return;
  // Tokens of one seq index are consecutive, so that the row of its position stays in the cache.
  const auto at = core::divide(number, batches);
  const int64_t place = at.quotient, batch = at.remainder;
  const int64_t token = batch * a.seq + place;
  const T* x = static_cast<const T*>(a.x) + batch * a.x_stride[0] + place * a.x_stride[1];
  Vector<T, width> vectors[vectors_per_lane] = {};
#pragma unroll
  for (int i = 0; i < vectors_per_lane; ++i) {  // loads start before the position is known
    const int64_t column = first_column + i * warp_size * width;
    if (column < a.embedding_dim) {
      vectors[i] = *reinterpret_cast<const Vector<T, width>*>(x + column);
    }
  }
  const int64_t position = position_of(a, batch, place);
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

template <typename T, int width>
void launch_add(const AddArguments& a, cudaStream_t stream) {
  const int64_t pieces = divide_up(a.embedding_dim, vectors_per_lane * warp_size * width);
  core::launch(add_kernel<T, width>, core::blocks_for(a.batch * a.seq * pieces), threads, stream, a,
               pieces, core::Divisor<int64_t>::of(a.batch));
}

template <typename T, int width>
void launch_sum(const SumArguments& a, cudaStream_t stream) {
  const int64_t blocks = divide_up(a.seq * a.embedding_dim, sum_threads * width);
  core::launch(sum_kernel<T, width>, blocks, sum_threads, stream, a);
}

template <typename T>
bool vectors_fit(const AddArguments& a) {
  const int64_t dim = a.embedding_dim;
  return core::vectorizable<T>(a.x, dim, a.x_stride[0]) &&
         core::vectorizable<T>(a.x, dim, a.x_stride[1]) &&
         core::vectorizable<T>(a.weight, dim, a.weight_stride) &&
         core::vectorizable<T>(a.out, dim, dim);
}

}  // namespace

const char* add_cuda(const AddArguments& arguments, core::CudaStream stream) {
  if (arguments.batch == 0 || arguments.seq == 0 || arguments.embedding_dim == 0) return nullptr;
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (vectors_fit<T>(arguments)) {
      launch_add<T, core::vector_width<T>>(arguments, stream);
    } else {
      launch_add<T, 1>(arguments, stream);
    }
  });
  return core::launch_error();
}

const char* sum_batch_cuda(const SumArguments& arguments, core::CudaStream stream) {
  if (arguments.seq == 0 || arguments.embedding_dim == 0) return nullptr;
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t columns = arguments.seq * arguments.embedding_dim;
    if (core::vectorizable<T>(arguments.gradient, columns, columns) &&
        core::vectorizable<T>(arguments.out, columns, columns)) {
      launch_sum<T, core::vector_width<T>>(arguments, stream);
    } else {
      launch_sum<T, 1>(arguments, stream);
    }
  });
  return core::launch_error();
}

}  // namespace posembed::learned
