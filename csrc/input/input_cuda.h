// The rows of a token in device code: its columns, and how they are read ahead.
#pragma once

#include <algorithm>

#include "core/async_copy.h"
#include "core/block_reduce.h"
#include "core/device_store.h"
#include "core/divisor.h"
#include "input/input.h"

namespace posembed::input {
namespace {

using core::Compute;
using core::load;
using core::store;
using core::Vector;

/// The addresses of the rows to sum for one token.
template <typename T>
struct TokenRowPointers {
  const T* token = nullptr;
  const T* type = nullptr;
  const T* position = nullptr;
  const Compute<T>* encoding = nullptr;
  int64_t type_index = 0;
  bool valid = true;
};

/// Indices of a token: in the batch, in the sequence, and in [batch, seq].
struct TokenIndices {
  int64_t batch, seq, token;
};

/// The row of one table; nullptr for an index outside it, which the thread with `records` set
/// records.
template <typename T>
__device__ const T* table_row(const Arguments& a, const Table& table, int64_t index,
                              const TokenIndices& at, bool records, bool* valid) {
  if (table.data == nullptr) return nullptr;
  const auto row = static_cast<uint64_t>(index) + static_cast<uint64_t>(table.first_row);
  if (row >= static_cast<uint64_t>(table.rows)) {
    *valid = false;
    if (records) {
      record_error(a.error, table.kind, index, at.token, table.rows - table.first_row);
    }
    return nullptr;
  }
  return static_cast<const T*>(table.data) + static_cast<int64_t>(row) * table.stride;
}

template <typename T>
__device__ TokenRowPointers<T> rows_of(const Arguments& a, const TokenIndices& at, bool records) {
  TokenRowPointers<T> rows;
  const auto row_of = [&](const Table& table) {
    const int64_t index = row_index(table, at.batch, at.seq);
    return table_row<T>(a, table, index, at, records, &rows.valid);
  };
  rows.token = row_of(a.token);
  rows.type = row_of(a.type);
  rows.position = row_of(a.position);
  if (a.type.data != nullptr) rows.type_index = row_index(a.type, at.batch, at.seq);
  if (a.encoding != nullptr) {
    rows.encoding = static_cast<const Compute<T>*>(a.encoding) + at.batch * a.encoding_stride[0] +
                    at.seq * a.encoding_stride[1];
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
  if (row == nullptr) return;
  const Columns<T, width> addend = load_columns<T, width>(row, column);
#pragma unroll
  for (int k = 0; k < width; ++k) sum->values[k] += addend.values[k];
}

/// Adds the columns of a position's sinusoid.
template <typename T, int width>
__device__ void add_encoding(const Compute<T>* columns, Columns<T, width>* sum) {
  if (columns == nullptr) return;
  Columns<T, width> addend;
  core::load_values<width>(columns, addend.values);
#pragma unroll
  for (int k = 0; k < width; ++k) sum->values[k] += addend.values[k];
}

/// The scaled columns of a token's row.
template <typename T, int width>
__device__ Columns<T, width> token_columns(const T* row, Compute<T> scale, int64_t column) {
  Columns<T, width> sum = load_columns<T, width>(row, column);
  if (scale == 1) return sum;
#pragma unroll
  for (int k = 0; k < width; ++k) sum.values[k] *= scale;
  return sum;
}

/// The sum of token, type and position, in BERT's order.
template <typename T, int width>
__device__ Columns<T, width> sum_columns(const Arguments& a, const TokenRowPointers<T>& rows,
                                         int64_t column) {
  auto sum = token_columns<T, width>(rows.token, static_cast<Compute<T>>(a.scale), column);
  add_columns<T, width>(rows.type, column, &sum);
  add_columns<T, width>(rows.position, column, &sum);
  add_encoding<T, width>(rows.encoding == nullptr ? nullptr : rows.encoding + column, &sum);
  return sum;
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
  bool share_positions;  // all sequences have the same positions
};

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
template <typename T, int width, int kept, bool one_warp, bool whole = false>
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
template <typename T, int width, int kept, bool one_warp>
struct RowReader {
  using C = Compute<T>;
  using Row = KeptRow<T, width, kept>;
  using RowSlots = Slots<T, width, one_warp>;

  const Arguments& a;
  const Teams& teams;
  const RowColumns<T, width, kept, one_warp> columns;
  const RowSlots token_row, position_row;
  const bool needs_rows;  // false: only checks that they exist
  // The token that is being read.
  int64_t token = 0;
  const T* type_row = nullptr;
  const C* encoding = nullptr;
  int type = 0;
  bool token_valid = true, position_valid = true;
  // The one after it.
  int64_t batch, seq, id;

  __device__ RowReader(const Arguments& input, const Teams& all_teams, int64_t number, int rows,
                       bool needed = true)
      : a(input),
        teams(all_teams),
        columns(input),
        token_row(RowSlots::of(0, rows, kept)),
        position_row(RowSlots::of(1, rows, kept)),
        needs_rows(needed) {
    const auto first = core::divide(number, teams.batch);
    batch = first.remainder;
    seq = first.quotient;
    id = row_index(a.token, batch, seq);
  }

  __device__ static bool records() { return Member<one_warp>::rank() == 0; }

  __device__ void read_row(const T* row, const RowSlots& to) const {
    if (row == nullptr) return;
    const T* from = row + columns.first;
    columns.for_each([&](int i, int offset) {
      core::copy_async(reinterpret_cast<const Vector<T, width>*>(from + offset), &to[i]);
    });
  }

  /// Starts to read the next token. It may be the last.
  __device__ void read_next(bool is_first) {
    const TokenIndices at{batch, seq, batch * a.seq + seq};
    token = at.token;
    token_valid = true;
    const T* row = table_row<T>(a, a.token, id, at, records(), &token_valid);
    if (needs_rows) read_row(row, token_row);
    if (a.type.data != nullptr) {
      const int64_t index = row_index(a.type, batch, seq);
      type = static_cast<int>(index);
      type_row = table_row<T>(a, a.type, index, at, records(), &token_valid);
    }
    if (is_first || batch == 0 || !teams.share_positions) read_position(at);
    if (++batch == a.batch) {
      batch = 0;
      ++seq;
    }
    if (seq < a.seq) id = row_index(a.token, batch, seq);
  }

  __device__ void read_position(const TokenIndices& at) {
    position_valid = true;
    if (a.position.data != nullptr) {
      const int64_t index = row_index(a.position, at.batch, at.seq);
      const T* row = table_row<T>(a, a.position, index, at, records(), &position_valid);
      if (needs_rows) read_row(row, position_row);
    }
    if (a.encoding == nullptr) return;
    encoding = static_cast<const C*>(a.encoding) + at.batch * a.encoding_stride[0] +
               at.seq * a.encoding_stride[1] + columns.first;
  }

  __device__ bool valid() const { return token_valid && position_valid; }

  /// The sum of token, type and position, in BERT's order. The token must be valid, and its rows
  /// must have arrived.
  __device__ void sum(C scale, Row* row) const {
    const T* type_columns = type_row == nullptr ? nullptr : type_row + columns.first;
    columns.for_each([&](int i, int offset) {
      auto sum = token_columns<T, width>(token_row[i].values, scale, 0);
      add_columns<T, width>(type_columns, offset, &sum);
      if (a.position.data != nullptr) add_columns<T, width>(position_row[i].values, 0, &sum);
      add_encoding<T, width>(encoding == nullptr ? nullptr : encoding + offset, &sum);
      row->vector[i] = sum;
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
