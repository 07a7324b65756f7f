// Forward: a block sums a token's rows once, keeps the sum in shared memory, and reduces mean and
// variance in two passes. Backward: each of a fixed number of blocks works through its share of the
// tokens and keeps its part of the norm's gradients to itself; a second kernel adds the parts in
// order. No atomics.
#include "core/device_vector.h"
#include "core/philox.h"
#include "input/kernel.h"

namespace posembed::input {
namespace {

using core::Compute;
using core::divide_up;
using core::load;
using core::store;
using core::Vector;
using core::warp_size;

constexpr int max_threads = 256;
// What a block may keep in shared memory without asking; wider rows are summed again where they are
// needed.
constexpr int64_t row_cache_bytes = 16 * 1024;
constexpr int64_t part_cache_bytes = 31 * 1024;

/// Sums `value` over the block; every thread gets the result, always in the same order.
template <typename C>
__device__ C block_sum(C value) {
  __shared__ C sums[max_threads / warp_size];
  for (int offset = warp_size / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  if (threadIdx.x % warp_size == 0) sums[threadIdx.x / warp_size] = value;
  __syncthreads();
  C total = 0;
  for (unsigned warp = 0; warp < blockDim.x / warp_size; ++warp) total += sums[warp];
  __syncthreads();  // before the next call writes
  return total;
}

/// The rows that one token adds up.
template <typename T>
struct Rows {
  const T* token = nullptr;
  const T* type = nullptr;
  const T* position = nullptr;
  const Compute<T>* encoding = nullptr;
  bool valid = true;
};

/// The row of one table, or nullptr, where an index outside is recorded by one thread.
template <typename T>
__device__ const T* table_row(const Arguments& a, const Table& table, int64_t batch, int64_t place,
                              bool* valid) {
  if (table.data == nullptr) return nullptr;
  int64_t index = table.offset + place;
  if (table.index.data != nullptr) {
    index = read(table.index, batch * table.index_stride[0] + place * table.index_stride[1]);
  }
  const auto row = static_cast<uint64_t>(index) + static_cast<uint64_t>(table.first_row);
  if (row >= static_cast<uint64_t>(table.rows)) {
    *valid = false;
    if (threadIdx.x == 0) {
      record_error(a.error, table.kind, index, batch * a.seq + place, table.rows - table.first_row);
    }
    return nullptr;
  }
  return static_cast<const T*>(table.data) + static_cast<int64_t>(row) * table.stride;
}

template <typename T>
__device__ Rows<T> rows_of(const Arguments& a, int64_t token) {
  const int64_t batch = token / a.seq, place = token % a.seq;
  Rows<T> rows;
  rows.token = table_row<T>(a, a.token, batch, place, &rows.valid);
  rows.type = table_row<T>(a, a.type, batch, place, &rows.valid);
  rows.position = table_row<T>(a, a.position, batch, place, &rows.valid);
  if (a.encoding != nullptr) {
    rows.encoding = static_cast<const Compute<T>*>(a.encoding) + batch * a.encoding_stride[0] +
                    place * a.encoding_stride[1];
  }
  return rows;
}

/// `width` neighbouring columns in the compute type.
template <typename T, int width>
struct Columns {
  Compute<T> values[width];
};

template <typename T, int width>
__device__ Columns<T, width> load_columns(const T* row, int64_t column) {
  const auto loaded = *reinterpret_cast<const Vector<T, width>*>(row + column);
  Columns<T, width> result;
#pragma unroll
  for (int k = 0; k < width; ++k) result.values[k] = load(loaded.values[k]);
  return result;
}

template <typename T, int width>
__device__ void store_columns(const Columns<T, width>& columns, T* row, int64_t column) {
  Vector<T, width> result;
#pragma unroll
  for (int k = 0; k < width; ++k) store(columns.values[k], &result.values[k]);
  *reinterpret_cast<Vector<T, width>*>(row + column) = result;
}

template <typename T, int width>
__device__ void add_columns(const T* row, int64_t column, Columns<T, width>* sum) {
  if (row == nullptr) return;
  const Columns<T, width> addend = load_columns<T, width>(row, column);
#pragma unroll
  for (int k = 0; k < width; ++k) sum->values[k] += addend.values[k];
}

/// Token, type and position added up, in the order in which BERT adds them.
template <typename T, int width>
__device__ Columns<T, width> sum_columns(const Arguments& a, const Rows<T>& rows, int64_t column) {
  Columns<T, width> sum = load_columns<T, width>(rows.token, column);
  const auto scale = static_cast<Compute<T>>(a.scale);
#pragma unroll
  for (int k = 0; k < width; ++k) sum.values[k] *= scale;
  add_columns<T, width>(rows.type, column, &sum);
  add_columns<T, width>(rows.position, column, &sum);
  if (rows.encoding != nullptr) {
#pragma unroll
    for (int k = 0; k < width; ++k) sum.values[k] += rows.encoding[column + k];
  }
  return sum;
}

/// Multiplies the columns, which begin with element `first` of the whole output, by dropout's
/// factors.
template <typename T, int width>
__device__ void drop_columns(const core::Dropout& dropout, uint64_t first,
                             Columns<T, width>* columns) {
  using C = Compute<T>;
  if constexpr (width % 4 == 0) {
#pragma unroll
    for (int k = 0; k < width; k += 4) {
      const core::Random4 random = core::philox(dropout.seed, (first + k) / 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        columns->values[k + i] *=
            random.words[i] < dropout.threshold ? C(0) : static_cast<C>(dropout.scale);
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < width; ++k)
      columns->values[k] *= core::dropout_factor<C>(dropout, first + k);
  }
}

__device__ core::Dropout dropout_of(double probability, const int64_t* seed) {
  return core::make_dropout(probability, seed == nullptr ? 0 : static_cast<uint64_t>(*seed));
}

extern __shared__ __align__(16) unsigned char shared_memory[];

// ---- forward ----

template <typename T, int width>
__global__ void __launch_bounds__(max_threads) forward_kernel(ForwardArguments f, bool cached) {
  using C = Compute<T>;
  const Arguments& a = f.input;
  const int64_t token = blockIdx.x, dim = a.embedding_dim;
  const int64_t begin = int64_t{threadIdx.x} * width, step = int64_t{blockDim.x} * width;
  T* out = static_cast<T*>(f.out) + token * dim;
  const Rows<T> rows = rows_of<T>(a, token);
  if (!rows.valid) {
    for (int64_t i = begin; i < dim; i += step) store_columns<T, width>({}, out, i);
    return;
  }

  // A thread reads back only what it has written itself.
  C* row = reinterpret_cast<C*>(shared_memory);
  const auto sum_at = [&](int64_t column) {
    return cached ? *reinterpret_cast<const Columns<T, width>*>(row + column)
                  : sum_columns<T, width>(a, rows, column);
  };
  C total = 0;
  for (int64_t i = begin; i < dim; i += step) {
    const auto columns = sum_columns<T, width>(a, rows, i);
    if (cached) *reinterpret_cast<Columns<T, width>*>(row + i) = columns;
#pragma unroll
    for (int k = 0; k < width; ++k) total += columns.values[k];
  }
  C mean = 0, rstd = 1;
  if (a.norm != Norm::none) {
    if (a.norm == Norm::layer) mean = block_sum(total) / static_cast<C>(dim);
    C squares = 0;
    for (int64_t i = begin; i < dim; i += step) {
      const auto columns = sum_at(i);
#pragma unroll
      for (int k = 0; k < width; ++k)
        squares += (columns.values[k] - mean) * (columns.values[k] - mean);
    }
    rstd = C(1) / sqrt(block_sum(squares) / static_cast<C>(dim) + static_cast<C>(a.eps));
    if (threadIdx.x == 0) {
      if (f.rstd != nullptr) static_cast<C*>(f.rstd)[token] = rstd;
      if (f.mean != nullptr) static_cast<C*>(f.mean)[token] = mean;
    }
  }

  const core::Dropout dropout = dropout_of(a.dropout, a.seed);
  for (int64_t i = begin; i < dim; i += step) {
    auto columns = sum_at(i);
#pragma unroll
    for (int k = 0; k < width; ++k) columns.values[k] = (columns.values[k] - mean) * rstd;
    if (a.norm_weight != nullptr) {
      const auto weight = load_columns<T, width>(static_cast<const T*>(a.norm_weight), i);
#pragma unroll
      for (int k = 0; k < width; ++k) columns.values[k] *= weight.values[k];
    }
    add_columns<T, width>(static_cast<const T*>(a.norm_bias), i, &columns);
    if (a.seed != nullptr)
      drop_columns<T, width>(dropout, static_cast<uint64_t>(token * dim + i), &columns);
    store_columns<T, width>(columns, out, i);
  }
}

// ---- backward ----

/// One token's row in the backward pass.
template <typename T, int width>
struct BackwardRow {
  const BackwardArguments& b;
  const Rows<T>& rows;
  const core::Dropout& dropout;
  int64_t token;
  Compute<T> mean, rstd;

  __device__ Columns<T, width> normalised(int64_t column) const {
    auto columns = sum_columns<T, width>(b.input, rows, column);
#pragma unroll
    for (int k = 0; k < width; ++k) columns.values[k] = (columns.values[k] - mean) * rstd;
    return columns;
  }

  /// The gradient of the norm's output.
  __device__ Columns<T, width> gradient(int64_t column) const {
    const int64_t first = token * b.input.embedding_dim;
    auto columns = load_columns<T, width>(static_cast<const T*>(b.gradient) + first, column);
    if (b.input.seed != nullptr)
      drop_columns<T, width>(dropout, static_cast<uint64_t>(first + column), &columns);
    return columns;
  }

  /// The gradient of the normalised row.
  __device__ Columns<T, width> weighted(Columns<T, width> columns, int64_t column) const {
    if (b.input.norm_weight == nullptr) return columns;
    const auto weight = load_columns<T, width>(static_cast<const T*>(b.input.norm_weight), column);
#pragma unroll
    for (int k = 0; k < width; ++k) columns.values[k] *= weight.values[k];
    return columns;
  }
};

template <typename T, int width>
__device__ void backward_token(const BackwardArguments& b, int64_t token, Compute<T>* weight_part,
                               Compute<T>* bias_part) {
  using C = Compute<T>;
  const Arguments& a = b.input;
  const int64_t dim = a.embedding_dim;
  const int64_t begin = int64_t{threadIdx.x} * width, step = int64_t{blockDim.x} * width;
  T* out = static_cast<T*>(b.sum_gradient) + token * dim;
  const Rows<T> rows = rows_of<T>(a, token);
  const core::Dropout dropout = dropout_of(a.dropout, a.seed);
  const bool normed = rows.valid && a.norm != Norm::none;
  const C mean = normed && b.mean != nullptr ? static_cast<const C*>(b.mean)[token] : C(0);
  const C rstd = normed ? static_cast<const C*>(b.rstd)[token] : C(1);
  const BackwardRow<T, width> row{b, rows, dropout, token, mean, rstd};
  if (!normed) {
    for (int64_t i = begin; i < dim; i += step) {
      store_columns<T, width>(rows.valid ? row.gradient(i) : Columns<T, width>{}, out, i);
    }
    return;
  }

  C sum = 0, along = 0;
  for (int64_t i = begin; i < dim; i += step) {
    const auto normalised = row.normalised(i);
    const auto gradient = row.gradient(i);
    const auto weighted = row.weighted(gradient, i);
#pragma unroll
    for (int k = 0; k < width; ++k) {
      sum += weighted.values[k];
      along += weighted.values[k] * normalised.values[k];
      if (weight_part != nullptr) weight_part[i + k] += gradient.values[k] * normalised.values[k];
      if (bias_part != nullptr) bias_part[i + k] += gradient.values[k];
    }
  }
  const C mean_gradient = a.norm == Norm::layer ? block_sum(sum) / static_cast<C>(dim) : C(0);
  along = block_sum(along) / static_cast<C>(dim);
  for (int64_t i = begin; i < dim; i += step) {
    const auto normalised = row.normalised(i);
    auto columns = row.weighted(row.gradient(i), i);
#pragma unroll
    for (int k = 0; k < width; ++k) {
      columns.values[k] = rstd * (columns.values[k] - mean_gradient - normalised.values[k] * along);
    }
    store_columns<T, width>(columns, out, i);
  }
}

template <typename T, int width>
__global__ void __launch_bounds__(max_threads) backward_kernel(BackwardArguments b, bool cached) {
  using C = Compute<T>;
  const int64_t dim = b.input.embedding_dim, tokens = b.input.batch * b.input.seq,
                part = blockIdx.x;
  const int64_t begin = int64_t{threadIdx.x} * width, step = int64_t{blockDim.x} * width;
  C* sums = static_cast<C*>(b.partial);
  C* result = sums == nullptr ? nullptr : sums + 2 * part * dim;
  C* weight = result != nullptr && cached ? reinterpret_cast<C*>(shared_memory) : result;
  C* bias = weight == nullptr ? nullptr : weight + dim;
  // Each thread keeps to its own columns throughout, so none has to wait for another.
  if (weight != nullptr) {
    for (int64_t i = begin; i < dim; i += step) {
      for (int k = 0; k < width; ++k) weight[i + k] = bias[i + k] = 0;
    }
  }
  for (int64_t token = part * tokens / b.parts; token < (part + 1) * tokens / b.parts; ++token) {
    backward_token<T, width>(b, token, weight, bias);
  }
  if (weight == result) return;
  for (int64_t i = begin; i < dim; i += step) {
    for (int k = 0; k < width; ++k) {
      result[i + k] = weight[i + k];
      result[dim + i + k] = bias[i + k];
    }
  }
}

constexpr int part_groups = 8;

/// A warp's lanes take neighbouring columns; the block's eight warps take an eighth of the parts
/// each.
template <typename T>
__global__ void __launch_bounds__(warp_size* part_groups) add_parts_kernel(BackwardArguments b) {
  using C = Compute<T>;
  __shared__ C sums[part_groups][2][warp_size];
  const int lane = threadIdx.x % warp_size, group = threadIdx.x / warp_size;
  const int64_t dim = b.input.embedding_dim, column = int64_t{blockIdx.x} * warp_size + lane;
  C weight = 0, bias = 0;
  if (column < dim) {
    for (int64_t part = group * b.parts / part_groups; part < (group + 1) * b.parts / part_groups;
         ++part) {
      const C* row = static_cast<const C*>(b.partial) + 2 * part * dim + column;
      weight += row[0];
      bias += row[dim];
    }
  }
  sums[group][0][lane] = weight;
  sums[group][1][lane] = bias;
  __syncthreads();
  if (group != 0 || column >= dim) return;
  for (int other = 1; other < part_groups; ++other) {
    weight += sums[other][0][lane];
    bias += sums[other][1][lane];
  }
  store(weight, static_cast<T*>(b.weight_gradient) + column);
  if (b.bias_gradient != nullptr) store(bias, static_cast<T*>(b.bias_gradient) + column);
}

// ---- dropout alone ----

template <typename T, int width>
__global__ void __launch_bounds__(max_threads) drop_kernel(DropoutArguments d) {
  const int64_t first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * width;
  if (first >= d.count) return;
  auto columns = load_columns<T, width>(static_cast<const T*>(d.x), first);
  drop_columns<T, width>(dropout_of(d.probability, d.seed), static_cast<uint64_t>(first), &columns);
  store_columns<T, width>(columns, static_cast<T*>(d.out), first);
}

// ---- launchers ----

template <typename T>
bool table_fits(const Table& table, int64_t dim) {
  return table.data == nullptr || core::vectorizable<T>(table.data, dim, table.stride);
}

/// Whether every row can be read in 16-byte vectors.
template <typename T>
bool vectors_fit(const Arguments& a) {
  const int64_t dim = a.embedding_dim;
  return table_fits<T>(a.token, dim) && table_fits<T>(a.type, dim) &&
         table_fits<T>(a.position, dim) && core::vectorizable<T>(a.norm_weight, dim, dim) &&
         core::vectorizable<T>(a.norm_bias, dim, dim);
}

/// As many threads as a row has vectors, in whole warps.
unsigned threads_for(int64_t dim, int width) {
  const int64_t warps = divide_up(dim, int64_t{width} * warp_size);
  return static_cast<unsigned>(warps * warp_size < max_threads ? warps * warp_size : max_threads);
}

template <typename T, int width>
void launch_forward(const ForwardArguments& f, cudaStream_t stream) {
  const Arguments& a = f.input;
  const int64_t bytes = a.embedding_dim * static_cast<int64_t>(sizeof(Compute<T>));
  const bool cached = bytes <= row_cache_bytes;
  forward_kernel<T, width>
      <<<static_cast<unsigned>(a.batch * a.seq), threads_for(a.embedding_dim, width),
         cached ? static_cast<size_t>(bytes) : 0, stream>>>(f, cached);
}

template <typename T, int width>
void launch_backward(const BackwardArguments& b, cudaStream_t stream) {
  const int64_t dim = b.input.embedding_dim;
  const int64_t bytes = 2 * dim * static_cast<int64_t>(sizeof(Compute<T>));
  const bool cached = b.partial != nullptr && bytes <= part_cache_bytes;
  backward_kernel<T, width><<<static_cast<unsigned>(b.parts), threads_for(dim, width),
                              cached ? static_cast<size_t>(bytes) : 0, stream>>>(b, cached);
  if (b.partial == nullptr) return;
  add_parts_kernel<T>
      <<<static_cast<unsigned>(divide_up(dim, warp_size)), warp_size * part_groups, 0, stream>>>(b);
}

template <typename T, int width>
void launch_drop(const DropoutArguments& d, cudaStream_t stream) {
  const int64_t blocks = divide_up(d.count, int64_t{max_threads} * width);
  drop_kernel<T, width><<<static_cast<unsigned>(blocks), max_threads, 0, stream>>>(d);
}

bool empty(const Arguments& a) { return a.batch == 0 || a.seq == 0 || a.embedding_dim == 0; }

}  // namespace

const char* forward_cuda(const ForwardArguments& arguments, core::CudaStream stream) {
  const Arguments& a = arguments.input;
  if (empty(a)) return nullptr;
  core::visit_scalar(a.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (vectors_fit<T>(a) &&
        core::vectorizable<T>(arguments.out, a.embedding_dim, a.embedding_dim)) {
      launch_forward<T, core::vector_width<T>>(arguments, stream);
    } else {
      launch_forward<T, 1>(arguments, stream);
    }
  });
  return core::launch_error();
}

const char* backward_cuda(const BackwardArguments& arguments, core::CudaStream stream) {
  const Arguments& a = arguments.input;
  if (a.embedding_dim == 0) return nullptr;
  core::visit_scalar(a.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t dim = a.embedding_dim;
    if (vectors_fit<T>(a) && core::vectorizable<T>(arguments.gradient, dim, dim) &&
        core::vectorizable<T>(arguments.sum_gradient, dim, dim)) {
      launch_backward<T, core::vector_width<T>>(arguments, stream);
    } else {
      launch_backward<T, 1>(arguments, stream);
    }
  });
  return core::launch_error();
}

const char* drop_cuda(const DropoutArguments& arguments, core::CudaStream stream) {
  if (arguments.count == 0) return nullptr;
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (core::vectorizable<T>(arguments.x, arguments.count, arguments.count) &&
        core::vectorizable<T>(arguments.out, arguments.count, arguments.count)) {
      launch_drop<T, core::vector_width<T>>(arguments, stream);
    } else {
      launch_drop<T, 1>(arguments, stream);
    }
  });
  return core::launch_error();
}

}  // namespace posembed::input
