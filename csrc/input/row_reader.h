// Reads the rows of a team's tokens ahead, in device code. Part of kernel_cuda.cu.
#pragma once

#include "core/async_copy.h"
#include "core/divisor.h"
#include "input/token_columns.h"

namespace posembed::input {
namespace {

using core::warp_size;

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

/// A thread's columns of a row: `kept` vectors, a team's width apart.
template <typename T, int width, int kept, bool one_warp>
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
      if (first + i * step < dim) function(i, i * step);
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

  __device__ RowReader(const Arguments& input, const Teams& of, int64_t number, int rows,
                       bool needed = true)
      : a(input),
        teams(of),
        columns(input),
        token_row(RowSlots::of(0, rows, kept)),
        position_row(RowSlots::of(1, rows, kept)),
        needs_rows(needed) {
    const auto first = core::divide(number, teams.batch);
    batch = first.remainder;
    seq = first.quotient;
    id = index_of(a.token, batch, seq);
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
      const int64_t index = index_of(a.type, batch, seq);
      type = static_cast<int>(index);
      type_row = table_row<T>(a, a.type, index, at, records(), &token_valid);
    }
    if (is_first || batch == 0 || !teams.share_positions) read_position(at);
    if (++batch == a.batch) {
      batch = 0;
      ++seq;
    }
    if (seq < a.seq) id = index_of(a.token, batch, seq);
  }

  __device__ void read_position(const TokenIndices& at) {
    position_valid = true;
    if (a.position.data != nullptr) {
      const int64_t index = index_of(a.position, at.batch, at.seq);
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
template <typename T, int width, int kept, bool one_warp>
__device__ void write_row(const RowColumns<T, width, kept, one_warp>& columns,
                          const KeptRow<T, width, kept>& row, T* out) {
  T* to = out + columns.first;
  columns.for_each([&](int i, int offset) { store_columns<T, width>(row.vector[i], to, offset); });
}

}  // namespace
}  // namespace posembed::input
