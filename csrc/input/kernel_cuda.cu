// Forward: a block sums a token's rows once, keeps the sum in shared memory, and reduces mean and
// variance in two passes. Backward: each of a fixed number of blocks processes its share of the
// tokens and has its own partial sums of the norm's gradients, which a second kernel adds in order.
// No atomics.
#include <algorithm>

#include "core/device_vector.h"
#include "core/philox.h"
#include "input/kernel.h"
#include "input/token_columns.h"

namespace posembed::input {
namespace {

using core::divide_up;
using core::warp_size;

constexpr int max_threads = 256;
// Shared memory that a block may use without opting in. Wider rows are summed again when needed.
constexpr int64_t row_cache_bytes = 16 * 1024;
constexpr int64_t part_cache_bytes = 31 * 1024;

/// The sum of `value` over the block, returned to every thread; its order is fixed.
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

/// Multiplies the columns by dropout's factors; the first column is element `first` of the mask.
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

/// The index of a token's column in dropout's mask.
__device__ uint64_t mask_index(const Arguments& a, int64_t token, int64_t column) {
  return static_cast<uint64_t>(a.first_element + token * a.embedding_dim + column);
}

// ---- forward ----

template <typename T, int width, typename Waves>
__global__ void __launch_bounds__(max_threads)
    forward_kernel(ForwardArguments f, const __grid_constant__ Waves turns, bool cached) {
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

  // A thread only reads what it has written itself.
  C* row = reinterpret_cast<C*>(core::dynamic_shared_memory());
  const auto sum_at = [&](int64_t column) {
    if (!cached) return sum_columns<T, width>(a, turns, rows, column);
    Columns<T, width> columns;
    core::load_values<width>(row + column, columns.values);
    return columns;
  };
  C total = 0;
  for (int64_t i = begin; i < dim; i += step) {
    const auto columns = sum_columns<T, width>(a, turns, rows, i);
    if (cached) core::store_values<width>(columns.values, row + i);
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
    if (a.seed != nullptr) drop_columns<T, width>(dropout, mask_index(a, token, i), &columns);
    store_columns<T, width>(columns, out, i);
  }
}

// ---- backward ----

/// One token's row in the backward pass.
template <typename T, int width, typename Waves>
struct BackwardRow {
  const BackwardArguments& b;
  const Waves& turns;
  const Rows<T>& rows;
  const core::Dropout& dropout;
  int64_t token;
  Compute<T> mean, rstd;

  __device__ Columns<T, width> normalised(int64_t column) const {
    auto columns = sum_columns<T, width>(b.input, turns, rows, column);
#pragma unroll
    for (int k = 0; k < width; ++k) columns.values[k] = (columns.values[k] - mean) * rstd;
    return columns;
  }

  /// The gradient of the norm's output.
  __device__ Columns<T, width> gradient(int64_t column) const {
    const int64_t first = token * b.input.embedding_dim;
    auto columns = load_columns<T, width>(static_cast<const T*>(b.gradient) + first, column);
    if (b.input.seed != nullptr)
      drop_columns<T, width>(dropout, mask_index(b.input, token, column), &columns);
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

/// A part's sums: rows for the norm's weight and bias, then for each type. A thread always has the
/// same columns, so threads need not wait for each other.
template <typename C>
struct Sums {
  C* data = nullptr;  // nullptr: not needed
  int64_t columns = 0;

  __device__ C* row(int64_t number) const { return data + number * columns; }
};

template <typename T, int width>
__device__ void add_to_sum(const Columns<T, width>& values, Compute<T>* sum) {
  Columns<T, width> total;
  core::load_values<width>(sum, total.values);
#pragma unroll
  for (int k = 0; k < width; ++k) total.values[k] += values.values[k];
  core::store_values<width>(total.values, sum);
}

/// Writes the gradient of a token's sum and adds it to the sum of its type.
template <typename T, int width>
__device__ void write_gradient(const BackwardArguments& b, const Sums<Compute<T>>& sums,
                               const Rows<T>& rows, int64_t token, int64_t column,
                               const Columns<T, width>& values) {
  if (b.type_gradient != nullptr && rows.valid) {
    add_to_sum<T, width>(values, sums.row(2 + rows.type_index) + column);
  }
  if (b.sum_gradient == nullptr) return;
  store_columns<T, width>(values, static_cast<T*>(b.sum_gradient) + token * b.input.embedding_dim,
                          column);
}

template <typename T, int width, typename Waves>
__device__ void backward_token(const BackwardArguments& b, const Waves& turns, int64_t token,
                               const Sums<Compute<T>>& sums) {
  using C = Compute<T>;
  const Arguments& a = b.input;
  const int64_t dim = a.embedding_dim;
  const int64_t begin = int64_t{threadIdx.x} * width, step = int64_t{blockDim.x} * width;
  const Rows<T> rows = rows_of<T>(a, token);
  const core::Dropout dropout = dropout_of(a.dropout, a.seed);
  const bool normed = rows.valid && a.norm != Norm::none;
  const C mean = normed && b.mean != nullptr ? static_cast<const C*>(b.mean)[token] : C(0);
  const C rstd = normed ? static_cast<const C*>(b.rstd)[token] : C(1);
  const BackwardRow<T, width, Waves> row{b, turns, rows, dropout, token, mean, rstd};
  if (!normed) {
    for (int64_t i = begin; i < dim; i += step) {
      write_gradient<T, width>(b, sums, rows, token, i,
                               rows.valid ? row.gradient(i) : Columns<T, width>{});
    }
    return;
  }

  C sum = 0, along = 0;
  for (int64_t i = begin; i < dim; i += step) {
    const auto normalised = row.normalised(i);
    const auto gradient = row.gradient(i);
    const auto weighted = row.weighted(gradient, i);
    Columns<T, width> product;
#pragma unroll
    for (int k = 0; k < width; ++k) {
      sum += weighted.values[k];
      along += weighted.values[k] * normalised.values[k];
      product.values[k] = gradient.values[k] * normalised.values[k];
    }
    if (b.weight_gradient == nullptr) continue;
    add_to_sum<T, width>(product, sums.row(0) + i);
    add_to_sum<T, width>(gradient, sums.row(1) + i);
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
    write_gradient<T, width>(b, sums, rows, token, i, columns);
  }
}

template <typename T, int width, typename Waves>
__global__ void __launch_bounds__(max_threads)
    backward_kernel(BackwardArguments b, const __grid_constant__ Waves turns, bool cached) {
  using C = Compute<T>;
  const int64_t dim = b.input.embedding_dim, tokens = b.input.batch * b.input.seq,
                part = blockIdx.x, columns = partial_columns(dim);
  const int64_t begin = int64_t{threadIdx.x} * width, step = int64_t{blockDim.x} * width;
  const int64_t count = b.partial == nullptr ? 0 : sums_of(b);
  const Sums<C> result{static_cast<C*>(b.partial) + part * count * columns, columns};
  const Sums<C> sums =
      cached ? Sums<C>{reinterpret_cast<C*>(core::dynamic_shared_memory()), columns} : result;
  for (int64_t number = 0; number < count; ++number) {
    for (int64_t i = begin; i < dim; i += step) {
      for (int k = 0; k < width; ++k) sums.row(number)[i + k] = 0;
    }
  }
  for (int64_t token = part * tokens / b.parts; token < (part + 1) * tokens / b.parts; ++token) {
    backward_token<T, width>(b, turns, token, sums);
  }
  if (!cached) return;
  for (int64_t number = 0; number < count; ++number) {
    for (int64_t i = begin; i < dim; i += step) {
      for (int k = 0; k < width; ++k) result.row(number)[i + k] = sums.row(number)[i + k];
    }
  }
}

constexpr int part_groups = 32;

/// A warp's lanes take neighbouring columns of sum blockIdx.y; the block's warps share the parts.
template <typename T>
__global__ void __launch_bounds__(warp_size* part_groups) add_parts_kernel(BackwardArguments b) {
  using C = Compute<T>;
  __shared__ C totals[part_groups][warp_size];
  T* out = sum_target<T>(b, blockIdx.y);
  if (out == nullptr) return;
  const int lane = threadIdx.x % warp_size, group = threadIdx.x / warp_size;
  const int64_t dim = b.input.embedding_dim, column = int64_t{blockIdx.x} * warp_size + lane;
  const int64_t columns = partial_columns(dim), stride = sums_of(b) * columns;
  const C* from = static_cast<const C*>(b.partial) + blockIdx.y * columns + column;
  C total = 0;
  if (column < dim) {
    const int64_t end = (group + 1) * b.parts / part_groups;
#pragma unroll 8
    for (int64_t part = group * b.parts / part_groups; part < end; ++part) {
      total += from[part * stride];
    }
  }
  totals[group][lane] = total;
  __syncthreads();
  if (group != 0 || column >= dim) return;
  for (int other = 1; other < part_groups; ++other) total += totals[other][lane];
  store(total, out + column);
}

// ---- dropout alone ----

template <typename T, int width>
__global__ void __launch_bounds__(max_threads) drop_kernel(DropoutArguments d) {
  const int64_t first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * width;
  if (first >= d.count) return;
  auto columns = load_columns<T, width>(static_cast<const T*>(d.x), first);
  drop_columns<T, width>(dropout_of(d.probability, d.seed), static_cast<uint64_t>(d.first + first),
                         &columns);
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

/// A thread for each vector of a row, in whole warps.
unsigned threads_for(int64_t dim, int width) {
  const int64_t warps = divide_up(dim, int64_t{width} * warp_size);
  return static_cast<unsigned>(warps * warp_size < max_threads ? warps * warp_size : max_threads);
}

/// Calls launch(turns) with the turns of the kernel's sinusoid, if any.
template <typename T, typename Launch>
void with_turns(const sinusoidal::Sinusoid& sinusoid, const Launch& launch) {
  if (sinusoid.pairs == 0) return launch(NoTurns{});
  Turns<T> turns;
  std::copy_n(sinusoidal::turns_of<T>(sinusoid), sinusoid.pairs, turns.turn);
  launch(turns);
}

template <typename T, int width>
void launch_forward(const ForwardArguments& f, cudaStream_t stream) {
  const Arguments& a = f.input;
  const int64_t bytes = a.embedding_dim * static_cast<int64_t>(sizeof(Compute<T>));
  const bool cached = bytes <= row_cache_bytes;
  with_turns<T>(a.sinusoid, [&](const auto& turns) {
    core::launch_with(forward_kernel<T, width, std::decay_t<decltype(turns)>>,
                      core::grid_of(a.batch * a.seq), threads_for(a.embedding_dim, width),
                      cached ? static_cast<size_t>(bytes) : 0, stream, f, turns, cached);
  });
}

template <typename T, int width>
void launch_backward(const BackwardArguments& b, cudaStream_t stream) {
  const int64_t dim = b.input.embedding_dim;
  const int64_t bytes =
      sums_of(b) * partial_columns(dim) * static_cast<int64_t>(sizeof(Compute<T>));
  const bool cached = b.partial != nullptr && bytes <= part_cache_bytes;
  with_turns<T>(b.input.sinusoid, [&](const auto& turns) {
    core::launch_with(backward_kernel<T, width, std::decay_t<decltype(turns)>>,
                      static_cast<unsigned>(b.parts), threads_for(dim, width),
                      cached ? static_cast<size_t>(bytes) : 0, stream, b, turns, cached);
  });
  if (b.partial == nullptr) return;
  const dim3 grid(static_cast<unsigned>(divide_up(dim, warp_size)),
                  static_cast<unsigned>(sums_of(b)));
  core::launch_with(add_parts_kernel<T>, grid, warp_size * part_groups, 0, stream, b);
}

template <typename T, int width>
void launch_drop(const DropoutArguments& d, cudaStream_t stream) {
  const int64_t blocks = divide_up(d.count, int64_t{max_threads} * width);
  core::launch(drop_kernel<T, width>, blocks, max_threads, stream, d);
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
        (arguments.sum_gradient == nullptr ||
         core::vectorizable<T>(arguments.sum_gradient, dim, dim))) {
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
    // Four neighbours share a call of philox, so a vector must begin at the first of them.
    if (arguments.first % 4 == 0 &&
        core::vectorizable<T>(arguments.x, arguments.count, arguments.count) &&
        core::vectorizable<T>(arguments.out, arguments.count, arguments.count)) {
      launch_drop<T, core::vector_width<T>>(arguments, stream);
    } else {
      launch_drop<T, 1>(arguments, stream);
    }
  });
  return core::launch_error();
}

}  // namespace posembed::input
