// Forward: a team of one warp or a block keeps the sum of a token's rows in registers, and the row
// of a position for all the sequences that share it. Backward: each of a fixed number of blocks
// processes its share of the tokens and has its own partial sums of the norm's gradients, which a
// second kernel adds in order. No atomics.
#include <algorithm>

#include "core/block_reduce.h"
#include "core/device_vector.h"
#include "core/divisor.h"
#include "core/part_sum.h"
#include "core/philox.h"
#include "input/kernel.h"
#include "input/token_columns.h"

namespace posembed::input {
namespace {

using core::divide_up;
using core::warp_size;

constexpr int max_threads = 256;

template <typename C>
__device__ C block_sum(C value) {
  return core::over_block(value, core::Add());
}

// Shared memory that a block may use without opting in.
constexpr int64_t part_cache_bytes = 31 * 1024;

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

/// The most vectors of a row that a thread keeps in registers.
constexpr int most_kept = 4;

/// The division of tokens among teams of threads: a team takes one place in the sequences of a
/// slice of the batch.
struct Teams {
  int threads;  // of a team: one warp, with several teams in a block, or a block
  core::Divisor<int64_t> seq;
  int64_t slices, batch_of_slice;
  bool share_positions;  // all sequences have the same positions
};

/// The sum of `value` over a team, returned to every thread; its order is fixed.
template <typename C>
__device__ C team_sum(const Teams& teams, C value) {
  return teams.threads > warp_size ? block_sum(value) : core::over_warp(value, core::Add());
}

/// A thread's index in its team, and its team's index in the block.
struct Member {
  int in_block, team, rank;

  __device__ explicit Member(const Teams& teams)
      : in_block(static_cast<int>(blockDim.x) / teams.threads),
        team(static_cast<int>(threadIdx.x) / teams.threads),
        rank(static_cast<int>(threadIdx.x) - team * teams.threads) {}
};

/// Applies the norm's weight and bias, and dropout, to normalised columns.
template <typename T, int width>
__device__ void finish_columns(const Arguments& a, const core::Dropout& dropout, int64_t token,
                               int64_t column, Columns<T, width>* columns) {
  const T *weight = static_cast<const T*>(a.norm_weight),
          *bias = static_cast<const T*>(a.norm_bias);
  if (weight != nullptr && bias != nullptr) {
    const auto w = load_columns<T, width>(weight, column), b = load_columns<T, width>(bias, column);
#pragma unroll
    for (int k = 0; k < width; ++k) {
      columns->values[k] = core::fma(columns->values[k], w.values[k], b.values[k]);
    }
  } else if (weight != nullptr) {
    const auto w = load_columns<T, width>(weight, column);
#pragma unroll
    for (int k = 0; k < width; ++k) columns->values[k] *= w.values[k];
  } else {
    add_columns<T, width>(bias, column, columns);
  }
  if (a.seed != nullptr) {
    drop_columns<T, width>(dropout, mask_index(a, token, column), columns);
  }
}

template <typename C>
__device__ void save_moments(const ForwardArguments& f, int64_t token, C mean, C rstd) {
  if (f.rstd != nullptr) static_cast<C*>(f.rstd)[token] = rstd;
  if (f.mean != nullptr) static_cast<C*>(f.mean)[token] = mean;
}

/// A thread's columns of a row, in registers.
template <typename T, int width, int kept>
struct KeptRow {
  using C = Compute<T>;
  Columns<T, width> vector[kept] = {};
  int first, step, dim;  // columns

  __device__ KeptRow(const Arguments& a, const Teams& teams, int rank)
      : first(rank * width), step(teams.threads * width), dim(static_cast<int>(a.embedding_dim)) {}

  /// Calls function(vector, column) for the thread's vectors.
  template <typename Function>
  __device__ void for_each(const Function& function) {
#pragma unroll
    for (int i = 0; i < kept; ++i) {
      const int column = first + i * step;
      if (column < dim) function(&vector[i], column);
    }
  }

  /// Calls function(value, other's value) for all values.
  template <typename Function>
  __device__ void with(const KeptRow& other, const Function& function) {
#pragma unroll
    for (int i = 0; i < kept; ++i) {
#pragma unroll
      for (int k = 0; k < width; ++k) function(vector[i].values[k], other.vector[i].values[k]);
    }
  }

  /// The same for columns of the row alone; the rest stays 0.
  template <typename Function>
  __device__ void each_value(const Function& function) {
    for_each([&](Columns<T, width>* columns, int) {
#pragma unroll
      for (int k = 0; k < width; ++k) function(columns->values[k]);
    });
  }

  __device__ void read(const T* row) {
    for_each([&](Columns<T, width>* columns, int column) {
      *columns = load_columns<T, width>(row, column);
    });
  }

  __device__ void write(T* row) {
    for_each([&](Columns<T, width>* columns, int column) {
      store_columns<T, width>(*columns, row, column);
    });
  }

  __device__ void add(const T* row) {
    if (row == nullptr) return;
    for_each([&](Columns<T, width>* columns, int column) {
      add_columns<T, width>(row, column, columns);
    });
  }

  __device__ void add_position(const TokenRowPointers<T>& rows) {
    for_each([&](Columns<T, width>* columns, int column) {
      input::add_position<T, width>(rows, column, columns);
    });
  }

  __device__ void multiply(C factor) {
    if (factor == 1) return;
    each_value([&](C& value) { value *= factor; });
  }
};

template <typename T, int width, int kept>
__global__ void __launch_bounds__(max_threads, 2)
    forward_kernel(ForwardArguments f, const __grid_constant__ Teams teams) {
  using C = Compute<T>;
  using Row = KeptRow<T, width, kept>;
  const Arguments& a = f.input;
  const Member member(teams);
  const auto at = core::divide(int64_t{blockIdx.x} * member.in_block + member.team, teams.seq);
  const int64_t begin = at.quotient * teams.batch_of_slice;
  const int64_t end = min(a.batch, begin + teams.batch_of_slice);
  if (begin >= end) return;

  const bool records = member.rank == 0, one_type = a.type.index.data == nullptr;
  const C scale = static_cast<C>(a.scale), inverse = C(1) / static_cast<C>(a.embedding_dim);
  const core::Dropout dropout = dropout_of(a.dropout, a.seed);
  // The rows that tokens share: that of the position, and of the only type.
  Row shared(a, teams, member.rank);
  bool shared_is_valid = true;
  int64_t next_id = index_of(a.token, begin, at.remainder);
  for (int64_t batch = begin; batch < end; ++batch) {
    const TokenIndices place{batch, at.remainder, batch * a.seq + at.remainder};
    const int64_t id = next_id;
    if (batch + 1 < end) next_id = index_of(a.token, batch + 1, at.remainder);
    const TokenRowPointers<T> rows = token_rows<T>(a, place, id, records);
    Row row(a, teams, member.rank);
    if (rows.valid) row.read(rows.token);
    if (batch == begin || !teams.share_positions) {
      TokenRowPointers<T> position;
      find_position(a, place, records, &position);
      shared_is_valid = position.valid;
      shared = Row(a, teams, member.rank);
      if (one_type) shared.add(rows.type);
      if (position.valid) shared.add_position(position);
    }
    T* out = static_cast<T*>(f.out) + place.token * a.embedding_dim;
    if (!rows.valid || !shared_is_valid) {
      Row(a, teams, member.rank).write(out);
      continue;
    }
    row.multiply(scale);
    if (!one_type) row.add(rows.type);
    row.with(shared, [](C& value, C addend) { value += addend; });
    C mean = 0, rstd = 1;
    if (a.norm != Norm::none) {
      if (a.norm == Norm::layer) {
        C sum = 0;
        row.each_value([&](C& value) { sum += value; });
        mean = team_sum(teams, sum) * inverse;
        row.each_value([&](C& value) { value -= mean; });
      }
      C squares = 0;
      row.each_value([&](C& value) { squares = core::fma(value, value, squares); });
      rstd = core::reciprocal_sqrt(team_sum(teams, squares) * inverse + static_cast<C>(a.eps));
      row.multiply(rstd);
      if (records) save_moments(f, place.token, mean, rstd);
    }
    row.for_each([&](Columns<T, width>* columns, int column) {
      finish_columns<T, width>(a, dropout, place.token, column, columns);
    });
    row.write(out);
  }
}

/// Rows wider than a block's registers: a block sums a token's rows again when it needs them.
template <typename T, int width>
__global__ void __launch_bounds__(max_threads) wide_forward_kernel(ForwardArguments f) {
  using C = Compute<T>;
  const Arguments& a = f.input;
  const int64_t token = blockIdx.x, dim = a.embedding_dim;
  const int64_t begin = int64_t{threadIdx.x} * width, step = int64_t{blockDim.x} * width;
  T* out = static_cast<T*>(f.out) + token * dim;
  const TokenRowPointers<T> rows =
      rows_of<T>(a, {token / a.seq, token % a.seq, token}, threadIdx.x == 0);
  if (!rows.valid) {
    for (int64_t i = begin; i < dim; i += step) store_columns<T, width>({}, out, i);
    return;
  }
  C mean = 0, rstd = 1;
  if (a.norm == Norm::layer) {
    C total = 0;
    for (int64_t i = begin; i < dim; i += step) {
      const auto columns = sum_columns<T, width>(a, rows, i);
#pragma unroll
      for (int k = 0; k < width; ++k) total += columns.values[k];
    }
    mean = block_sum(total) / static_cast<C>(dim);
  }
  if (a.norm != Norm::none) {
    C squares = 0;
    for (int64_t i = begin; i < dim; i += step) {
      const auto columns = sum_columns<T, width>(a, rows, i);
#pragma unroll
      for (int k = 0; k < width; ++k)
        squares += (columns.values[k] - mean) * (columns.values[k] - mean);
    }
    rstd = C(1) / sqrt(block_sum(squares) / static_cast<C>(dim) + static_cast<C>(a.eps));
    if (threadIdx.x == 0) save_moments(f, token, mean, rstd);
  }
  const core::Dropout dropout = dropout_of(a.dropout, a.seed);
  for (int64_t i = begin; i < dim; i += step) {
    auto columns = sum_columns<T, width>(a, rows, i);
#pragma unroll
    for (int k = 0; k < width; ++k) columns.values[k] = (columns.values[k] - mean) * rstd;
    finish_columns<T, width>(a, dropout, token, i, &columns);
    store_columns<T, width>(columns, out, i);
  }
}

// ---- backward ----

/// One token's row in the backward pass.
template <typename T, int width>
struct BackwardRow {
  const BackwardArguments& b;
  const TokenRowPointers<T>& rows;
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
                               const TokenRowPointers<T>& rows, int64_t token, int64_t column,
                               const Columns<T, width>& values) {
  if (b.type_gradient != nullptr && rows.valid) {
    add_to_sum<T, width>(values, sums.row(2 + rows.type_index) + column);
  }
  if (b.sum_gradient == nullptr) return;
  store_columns<T, width>(values, static_cast<T*>(b.sum_gradient) + token * b.input.embedding_dim,
                          column);
}

template <typename T, int width>
__device__ void backward_token(const BackwardArguments& b, const TokenIndices& place,
                               const Sums<Compute<T>>& sums) {
  using C = Compute<T>;
  const Arguments& a = b.input;
  const int64_t dim = a.embedding_dim;
  const int64_t begin = int64_t{threadIdx.x} * width, step = int64_t{blockDim.x} * width;
  const int64_t token = place.token;
  const TokenRowPointers<T> rows = rows_of<T>(a, place, threadIdx.x == 0);
  const core::Dropout dropout = dropout_of(a.dropout, a.seed);
  const bool normed = rows.valid && a.norm != Norm::none;
  const C mean = normed && b.mean != nullptr ? static_cast<const C*>(b.mean)[token] : C(0);
  const C rstd = normed ? static_cast<const C*>(b.rstd)[token] : C(1);
  const BackwardRow<T, width> row{b, rows, dropout, token, mean, rstd};
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

/// A block takes a part of the tokens. Its sums are `cached` in shared memory, or else in the
/// part's own.
template <typename T, int width>
__global__ void __launch_bounds__(max_threads)
    backward_kernel(BackwardArguments b, core::Divisor<int64_t> seq, bool cached) {
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
    const auto at = core::divide(token, seq);
    backward_token<T, width>(b, {at.quotient, at.remainder, token}, sums);
  }
  if (!cached) return;
  for (int64_t number = 0; number < count; ++number) {
    for (int64_t i = begin; i < dim; i += step) {
      for (int k = 0; k < width; ++k) result.row(number)[i + k] = sums.row(number)[i + k];
    }
  }
}

/// Adds the parts of sum blockIdx.y.
template <typename T>
__global__ void __launch_bounds__(core::part_threads) add_parts_kernel(BackwardArguments b) {
  using C = Compute<T>;
  T* out = sum_target<T>(b, blockIdx.y);
  if (out == nullptr) return;
  const int64_t dim = b.input.embedding_dim, columns = partial_columns(dim);
  const C* from = static_cast<const C*>(b.partial) + blockIdx.y * columns;
  const C total = core::sum_of_parts(from, b.parts, sums_of(b) * columns, dim);
  if (core::writes_parts() && core::part_column() < dim) store(total, out + core::part_column());
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

/// The fewest teams that keep a multiprocessor busy.
constexpr int64_t busy_teams = 64;

Teams teams_for(const Arguments& a, int threads) {
  const int64_t slices = std::min(a.batch, divide_up(busy_teams * core::multiprocessors(), a.seq));
  const bool share = a.position.index.data == nullptr || a.position.index_stride[0] == 0;
  return {threads, core::Divisor<int64_t>::of(a.seq), slices, divide_up(a.batch, slices),
          share && (a.encoding == nullptr || a.encoding_stride[0] == 0)};
}

/// Threads and registers for a row.
struct RowShape {
  int64_t warps, kept;  // kept: vectors of a thread

  RowShape(int64_t dim, int width) {
    const int64_t vectors = divide_up(dim, width);
    warps = divide_up(vectors, most_kept * warp_size);
    kept = divide_up(vectors, warps * warp_size);
  }

  bool fits() const { return warps * warp_size <= max_threads; }
  int threads() const { return static_cast<int>(warps) * warp_size; }
};

template <typename T, int width>
void launch_forward(const ForwardArguments& f, cudaStream_t stream) {
  const Arguments& a = f.input;
  const RowShape shape(a.embedding_dim, width);
  if (!shape.fits()) {
    return core::launch(wide_forward_kernel<T, width>, a.batch * a.seq, max_threads, stream, f);
  }
  const Teams teams = teams_for(a, shape.threads());
  const int in_block = shape.warps == 1 ? max_threads / warp_size : 1;
  const auto kernel = shape.kept <= 2   ? forward_kernel<T, width, 2>
                      : shape.kept == 3 ? forward_kernel<T, width, 3>
                                        : forward_kernel<T, width, most_kept>;
  core::launch(kernel, divide_up(a.seq * teams.slices, in_block), in_block * teams.threads, stream,
               f, teams);
}

/// A thread for each vector of a row, in whole warps.
unsigned threads_for(int64_t dim, int width) {
  const int64_t warps = divide_up(dim, int64_t{width} * warp_size);
  return static_cast<unsigned>(std::min<int64_t>(warps * warp_size, max_threads));
}

template <typename T, int width>
void launch_backward(const BackwardArguments& b, cudaStream_t stream) {
  const int64_t dim = b.input.embedding_dim;
  const int64_t bytes =
      sums_of(b) * partial_columns(dim) * static_cast<int64_t>(sizeof(Compute<T>));
  const bool cached = b.partial != nullptr && bytes <= part_cache_bytes;
  core::launch_with(backward_kernel<T, width>, static_cast<unsigned>(b.parts),
                    threads_for(dim, width), cached ? static_cast<size_t>(bytes) : 0, stream, b,
                    core::Divisor<int64_t>::of(std::max<int64_t>(1, b.input.seq)), cached);
  if (b.partial == nullptr) return;
  const dim3 grid(static_cast<unsigned>(divide_up(dim, warp_size)),
                  static_cast<unsigned>(sums_of(b)));
  core::launch_with(add_parts_kernel<T>, grid, core::part_threads, 0, stream, b);
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
