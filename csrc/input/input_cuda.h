// The rows of a token in device code: its columns, and how they are read ahead.
#pragma once

#include <algorithm>

#include "core/block_reduce.h"
#include "core/device_vector.h"
#include "core/divisor.h"
#include "core/philox.h"
#include "input/input.h"

namespace posembed::input {
namespace {

using core::Compute;
using core::load;
using core::store;
using core::Vector;

/// `width` neighbouring columns in the compute type.
template <typename T, int width>
struct Columns {
  Compute<T> values[width];
};

template <typename T, int width>
__device__ Columns<T, width> load_columns(const T* row, int64_t column) {
  const auto loaded = *reinterpret_cast<const Vector<T, width>*>(row + column);
  Columns<T, width> result;
  core::load_all(loaded.values, result.values);
  return result;
}

template <typename T, int width>
__device__ void store_columns(const Columns<T, width>& columns, T* row, int64_t column) {
  Vector<T, width> result;
#pragma unroll
  for (int k = 0; k < width; ++k) store(columns.values[k], &result.values[k]);
  core::write_vector<T, width>(result, row + column);
}

template <typename T, int width>
__device__ void add_columns(const T* row, int64_t column, Columns<T, width>* sum) {
  const Columns<T, width> addend = load_columns<T, width>(row, column);
#pragma unroll
  for (int k = 0; k < width; ++k) sum->values[k] += addend.values[k];
}

// -------------------------------------------------------------------------------------- row reader
// Teams of threads: a team's columns of a row, its sums over a row, and its tokens' rows, which are
// read ahead. In device code.

using core::warp_size;

constexpr int max_threads = 256;
constexpr int max_warps = max_threads / warp_size;

/// The most vectors of a row that a thread keeps in registers.
constexpr int max_kept = 4;

/// Teams of threads, each one warp or a block, divide the tokens.
struct Teams {
  int64_t tokens;  // of a team
  core::Divisor<int64_t> batch;
  bool share_positions;   // all sequences have the same positions
  core::Dropout dropout;  // without its seed
};

/// Applies dropout to columns; the first is element `first` of the mask.
template <typename T, int width>
__device__ void drop_columns(core::Dropout dropout, const int64_t* seed, uint64_t first,
                             Columns<T, width>* columns) {
  using C = Compute<T>;
  dropout.seed = static_cast<uint64_t>(*seed);
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

/// A thread's index in its team, and its team's index in the block and in the grid.
template <bool one_warp>
struct Member {
  __device__ static int threads() { return one_warp ? warp_size : static_cast<int>(blockDim.x); }
  __device__ static int rank() {
    return static_cast<int>(one_warp ? threadIdx.x % warp_size : threadIdx.x);
  }
  __device__ static int team() { return one_warp ? static_cast<int>(threadIdx.x / warp_size) : 0; }
  __device__ static int teams() { return one_warp ? static_cast<int>(blockDim.x / warp_size) : 1; }
  __device__ static int64_t number() { return int64_t{blockIdx.x} * teams() + team(); }
};

/// Sums over a team in a fixed order; every thread gets the sums. `buffer` starts as 0: calls
/// alternate between two buffers, so that a call needs only one barrier.
template <bool one_warp, int count, typename C>
__device__ void team_sum(C (&values)[count], int* buffer) {
#pragma unroll
  for (int i = 0; i < count; ++i) values[i] = core::over_warp(values[i], core::Add());
  if constexpr (!one_warp) {
    alignas(16) __shared__ C buffers[2][count][max_warps];
    auto& sums = buffers[*buffer];
    *buffer ^= 1;
    const unsigned warp = threadIdx.x / warp_size;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if (threadIdx.x % warp_size == 0) sums[i][warp] = values[i];
    }
    __syncthreads();
    const unsigned warps = blockDim.x / warp_size;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      C warp_sums[max_warps];
      core::load_values<max_warps>(sums[i], warp_sums);
      values[i] = warp_sums[0];
#pragma unroll
      for (unsigned other = 1; other < max_warps; ++other) {
        if (other < warps) values[i] += warp_sums[other];
      }
    }
  }
}

/// A thread's columns of a row: `kept` vectors, a team's width apart. `whole`: none is outside the
/// row.
template <typename T, int width, int kept, bool one_warp, bool whole>
struct RowColumns {
  int first, dim;

  __device__ explicit RowColumns(const Arguments& a)
      : first(Member<one_warp>::rank() * width), dim(static_cast<int>(a.embedding_dim)) {}

  /// Calls function(i, offset from the first column) for the vectors inside the row.
  template <typename Function>
  __device__ void for_each(const Function& function) const {
    const int step = Member<one_warp>::threads() * width;
#pragma unroll
    for (int i = 0; i < kept; ++i) {
      if (whole || first + i * step < dim) function(i, i * step);
    }
  }
};

template <typename T, int width, int kept>
struct KeptRow {
  Columns<T, width> vector[kept] = {};

  /// Calls function(value) for all values; those outside the row are 0.
  template <typename Function>
  __device__ void each_value(const Function& function) {
#pragma unroll
    for (int i = 0; i < kept; ++i) {
#pragma unroll
      for (int k = 0; k < width; ++k) function(vector[i].values[k]);
    }
  }
};

/// Rows of a team in shared memory: of token and position, then of the gradient.
constexpr int forward_rows = 2, backward_rows = 3;

/// Shared memory for a thread's vectors of a row, which no other thread uses.
template <typename T, int width, bool one_warp>
struct Slots {
  Vector<T, width>* data;

  /// The `number`-th of a team's rows.
  __device__ static Slots of(int number, int rows, int kept) {
    auto* memory = reinterpret_cast<Vector<T, width>*>(core::dynamic_shared_memory());
    const int row = Member<one_warp>::team() * rows + number;
    return {memory + row * kept * Member<one_warp>::threads() + Member<one_warp>::rank()};
  }

  __device__ Vector<T, width>& operator[](int i) const {
    return data[i * Member<one_warp>::threads()];
  }
};

/// Rows in the compute type in shared memory, after the slots: each thread of a team has its own
/// cells, in units of 16 bytes, a team's width apart.
template <typename C, int width, int kept, bool one_warp>
struct RowCells {
  static constexpr int size = sizeof(core::Part<C, width>) / sizeof(C);
  static constexpr int parts = width / size;
  C* data;

  /// Those of a team of the block, if each team has `rows`.
  __device__ static RowCells of(int team, int64_t rows, size_t slot_bytes) {
    const int threads = Member<one_warp>::threads();
    auto* cells = reinterpret_cast<C*>(core::dynamic_shared_memory() + slot_bytes);
    return {cells + team * rows * kept * width * threads + Member<one_warp>::rank() * size};
  }

  /// Calls function(cell, its first column in the vector) for the cells of a vector.
  template <typename Function>
  __device__ void for_each(int number, int i, const Function& function) const {
    const int unit = size * Member<one_warp>::threads();
    C* row = data + number * (kept * parts * unit);
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      function(row + (i * parts + part) * unit, part * size);
    }
  }

  __device__ void set(int number, int i, const C (&values)[width]) const {
    for_each(number, i,
             [&](C* cell, int first) { core::store_values<size>(values + first, cell); });
  }

  __device__ void add(int number, int i, const C (&values)[width]) const {
    for_each(number, i, [&](C* cell, int first) {
      C total[size];
      core::load_values<size>(cell, total);
#pragma unroll
      for (int k = 0; k < size; ++k) total[k] += values[first + k];
      core::store_values<size>(total, cell);
    });
  }

  /// Adds the cells of a vector to `total`.
  __device__ void add_to(int number, int i, C (&total)[width]) const {
    for_each(number, i, [&](const C* cell, int first) {
      C values[size];
      core::load_values<size>(cell, values);
#pragma unroll
      for (int k = 0; k < size; ++k) total[first + k] += values[k];
    });
  }
};

/// Reads the rows of a team's tokens ahead, each while the previous token is processed. Tokens are
/// numbered seq index * batch + batch index, so that sequences share the row of a position.
template <typename T, int width, int kept, bool one_warp, bool whole>
struct RowReader {
  using C = Compute<T>;
  using Row = KeptRow<T, width, kept>;
  using RowSlots = Slots<T, width, one_warp>;

  const Arguments& a;
  const Teams& teams;
  const RowColumns<T, width, kept, one_warp, whole> columns;
  const RowSlots token_row, position_row;
  const bool needs_rows;  // false: only checks that they exist
  // The token that is being read.
  int token = 0;
  int64_t type = 0;
  bool token_valid = true, position_valid = true, new_position = true;
  // The one after it.
  int batch, seq;
  int64_t id = 0;
  int64_t position = 0;  // that was read last; or the index of its encoding's first element

  __device__ RowReader(const Arguments& input, const Teams& all_teams, int64_t first, int rows,
                       bool needed = true)
      : a(input),
        teams(all_teams),
        columns(input),
        token_row(RowSlots::of(0, rows, kept)),
        position_row(RowSlots::of(1, rows, kept)),
        needs_rows(needed) {
    const auto at = core::divide(first, teams.batch);
    batch = static_cast<int>(at.remainder);
    seq = static_cast<int>(at.quotient);
    if (a.token.index.data != nullptr) id = core::read(a.token.index, next_token());
  }

  __device__ static bool records() { return Member<one_warp>::rank() == 0; }

  /// The index of the next token in [batch, seq].
  __device__ int next_token() const { return batch * static_cast<int>(a.seq) + seq; }

  /// Whether a row is inside its table; records its index otherwise.
  __device__ bool check(const Table& table, int64_t row, int64_t index) const {
    if (static_cast<uint64_t>(row) < static_cast<uint64_t>(table.rows)) return true;
    if (records()) record_error(a.error, table.kind, index, token, table.rows - table.first_row);
    return false;
  }

  __device__ void read_row(const void* data, int64_t element, const RowSlots& to) const {
    const T* from = static_cast<const T*>(data) + element + columns.first;
    columns.for_each([&](int i, int offset) {
      core::copy_async(reinterpret_cast<const Vector<T, width>*>(from + offset), &to[i]);
    });
  }

  /// Starts to read the next token, which may be the last.
  __device__ void read_next(bool is_first) {
    token = next_token();
    token_valid = check(a.token, id, id);
    if (token_valid && needs_rows) {
      read_row(a.token.data, int64_t{static_cast<int>(id)} * static_cast<int>(a.token.stride),
               token_row);
    }
    if (a.type.index.data != nullptr) type = core::read(a.type.index, token);
    new_position = is_first || batch == 0 || !teams.share_positions;
    if (new_position) read_position();
    if (++batch == static_cast<int>(a.batch)) {
      batch = 0;
      ++seq;
    }
    if (seq < static_cast<int>(a.seq)) id = core::read(a.token.index, next_token());
  }

  __device__ void read_position() {
    if (a.encoding != nullptr) {
      position = batch * a.encoding_stride[0] + seq * a.encoding_stride[1];
      return;
    }
    position = row_index(a.position, batch, seq);
    if (a.position.data == nullptr) return;
    const int64_t row = position + a.position.first_row;
    position_valid = check(a.position, row, position);
    if (position_valid && needs_rows)
      read_row(a.position.data, row * a.position.stride, position_row);
  }

  /// Whether the token's indices are inside their tables. Afterwards its type is, in any case.
  __device__ bool is_valid() {
    if (a.type.index.data == nullptr || check(a.type, type, type)) {
      return token_valid && position_valid;
    }
    type = 0;
    return false;
  }

  /// The scaled columns of the token's row, which must have arrived.
  __device__ void get_token(C scale, Row* row) const {
    columns.for_each([&](int i, int) {
      row->vector[i] = load_columns<T, width>(token_row[i].values, 0);
      if (scale == 1) return;
#pragma unroll
      for (int k = 0; k < width; ++k) row->vector[i].values[k] *= scale;
    });
  }

  __device__ void add_type(Row* sum) const {
    const T* from = static_cast<const T*>(a.type.data) + type * a.type.stride + columns.first;
    columns.for_each(
        [&](int i, int offset) { add_columns<T, width>(from, offset, &sum->vector[i]); });
  }

  /// Adds the position's row, which must have arrived, or its encoding.
  __device__ void add_position(Row* sum) const {
    if (a.position.data != nullptr) {
      columns.for_each(
          [&](int i, int) { add_columns<T, width>(position_row[i].values, 0, &sum->vector[i]); });
    } else if (a.encoding != nullptr) {
      const C* from = static_cast<const C*>(a.encoding) + position + columns.first;
      columns.for_each([&](int i, int offset) {
        C addend[width];
        core::load_values<width>(from + offset, addend);
#pragma unroll
        for (int k = 0; k < width; ++k) sum->vector[i].values[k] += addend[k];
      });
    }
  }

  /// Applies dropout, if there is any, to columns of a token.
  __device__ void drop(int of_token, Row* row) const {
    if (a.seed == nullptr) return;
    const auto first = static_cast<uint64_t>(a.first_element + of_token * a.embedding_dim);
    columns.for_each([&](int i, int offset) {
      drop_columns<T, width>(teams.dropout, a.seed, first + columns.first + offset,
                             &row->vector[i]);
    });
  }
};

/// Writes a thread's columns of a row.
template <typename T, int width, int kept, bool one_warp, bool whole>
__device__ void write_row(const RowColumns<T, width, kept, one_warp, whole>& columns,
                          const KeptRow<T, width, kept>& row, T* out) {
  T* to = out + columns.first;
  columns.for_each([&](int i, int offset) { store_columns<T, width>(row.vector[i], to, offset); });
}

template <typename C>
struct Moments {
  C mean = 0, rstd = 1;
};

template <typename C>
__device__ void save_moments(const ForwardArguments& f, int64_t token, const Moments<C>& moments) {
  if (f.rstd != nullptr) static_cast<C*>(f.rstd)[token] = moments.rstd;
  if (f.mean != nullptr) static_cast<C*>(f.mean)[token] = moments.mean;
}

/// Normalises a team's row. `inverse`: of the number of columns.
template <typename T, int width, int kept, bool one_warp, bool whole, typename C = Compute<T>>
__device__ Moments<C> normalise(const Arguments& a, C inverse,
                                const RowColumns<T, width, kept, one_warp, whole>& columns,
                                KeptRow<T, width, kept>* row, int* buffer) {
  Moments<C> moments;
  if (a.norm == Norm::layer) {
    C sum[1] = {};
    row->each_value([&](C& value) { sum[0] += value; });
    team_sum<one_warp>(sum, buffer);
    moments.mean = sum[0] * inverse;
    // Columns outside the row stay 0.
    columns.for_each([&](int i, int) {
#pragma unroll
      for (int k = 0; k < width; ++k) row->vector[i].values[k] -= moments.mean;
    });
  }
  C squares[1] = {};
  row->each_value([&](C& value) { squares[0] = core::fma(value, value, squares[0]); });
  team_sum<one_warp>(squares, buffer);
  moments.rstd = core::reciprocal_sqrt(squares[0] * inverse + static_cast<C>(a.eps));
  row->each_value([&](C& value) { value *= moments.rstd; });
  return moments;
}

}  // namespace
}  // namespace posembed::input
