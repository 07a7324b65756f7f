// The sum of a token's rows and its position's sinusoid, in device code. Part of kernel_cuda.cu.
#pragma once

#include "core/device_store.h"
#include "input/kernel.h"

namespace posembed::input {
namespace {

using core::Compute;
using core::load;
using core::store;
using core::Vector;

/// Turns passed as kernel arguments, which avoids a table in memory.
template <typename T>
struct Turns {
  sinusoidal::TurnOf<T> turn[turn_bytes_cuda / sizeof(sinusoidal::TurnOf<T>)];
};

/// For sums without a sinusoid.
struct NoTurns {};

/// The rows to sum for one token.
template <typename T>
struct Rows {
  const T* token = nullptr;
  const T* type = nullptr;
  const T* position = nullptr;
  const Compute<T>* encoding = nullptr;
  int64_t type_index = 0;
  int64_t position_index = 0;
  bool valid = true;
};

/// The row of one table; nullptr for an index outside it, which one thread records.
template <typename T>
__device__ const T* table_row(const Arguments& a, const Table& table, int64_t index, int64_t place,
                              bool* valid) {
  if (table.data == nullptr) return nullptr;
  const auto row = static_cast<uint64_t>(index) + static_cast<uint64_t>(table.first_row);
  if (row >= static_cast<uint64_t>(table.rows)) {
    *valid = false;
    if (threadIdx.x == 0) {
      record_error(a.error, table.kind, index, place, table.rows - table.first_row);
    }
    return nullptr;
  }
  return static_cast<const T*>(table.data) + static_cast<int64_t>(row) * table.stride;
}

template <typename T>
__device__ Rows<T> rows_of(const Arguments& a, int64_t token) {
  const int64_t batch = token / a.seq, place = token % a.seq;
  Rows<T> rows;
  const int64_t id = index_of(a.token, batch, place);
  rows.token = table_row<T>(a, a.token, id, token, &rows.valid);
  if (a.type.data != nullptr) rows.type_index = index_of(a.type, batch, place);
  rows.type = table_row<T>(a, a.type, rows.type_index, token, &rows.valid);
  rows.position_index = index_of(a.position, batch, place);
  rows.position = table_row<T>(a, a.position, rows.position_index, token, &rows.valid);
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
  core::write_vector<T, width>(result, row + column);
}

template <typename T, int width>
__device__ void add_columns(const T* row, int64_t column, Columns<T, width>* sum) {
  if (row == nullptr) return;
  const Columns<T, width> addend = load_columns<T, width>(row, column);
#pragma unroll
  for (int k = 0; k < width; ++k) sum->values[k] += addend.values[k];
}

/// A pair's values at a position; `first` belongs to its first column.
template <typename T>
struct Wave {
  Compute<T> first, second;
};

template <typename T>
__device__ Wave<T> wave_at(const sinusoidal::Sinusoid& sinusoid, const Turns<T>& turns,
                           int64_t position, int64_t pair) {
  Compute<T> sine, cosine;
  const core::Position place = sinusoidal::placed(sinusoid, {position, 0, 1.0});
  const auto scale = static_cast<Compute<T>>(scale_of(sinusoid) * place.scale);
  sinusoidal::sincos_at(place, turns.turn[pair], 0, scale, &sine, &cosine);
  return sinusoid.layout.cos_first ? Wave<T>{cosine, sine} : Wave<T>{sine, cosine};
}

/// One column of a sinusoid.
template <typename T>
__device__ Compute<T> wave_column(const sinusoidal::Sinusoid& sinusoid, const Turns<T>& turns,
                                  int64_t position, int64_t column) {
  const sinusoidal::Layout& layout = sinusoid.layout;
  if (column >= layout.filled) return 0;
  const bool second = layout.interleaved ? column % 2 == 1 : column >= layout.half;
  const int64_t pair = layout.interleaved ? column / 2 : second ? column - layout.half : column;
  const Wave<T> wave = wave_at(sinusoid, turns, position, pair);
  return second ? wave.second : wave.first;
}

template <typename T, int width>
__device__ void add_wave(const Arguments& a, const Turns<T>& turns, int64_t position,
                         int64_t column, Columns<T, width>* sum) {
  if (width % 2 == 0 && a.sinusoid.layout.interleaved) {
#pragma unroll
    for (int k = 0; k + 1 < width; k += 2) {
      const Wave<T> wave = wave_at(a.sinusoid, turns, position, (column + k) / 2);
      sum->values[k] += wave.first;
      sum->values[k + 1] += wave.second;
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < width; ++k) {
    sum->values[k] += wave_column(a.sinusoid, turns, position, column + k);
  }
}

template <typename T, int width>
__device__ void add_wave(const Arguments&, const NoTurns&, int64_t, int64_t, Columns<T, width>*) {}

/// The sum of token, type and position, in BERT's order.
template <typename T, int width, typename Waves>
__device__ Columns<T, width> sum_columns(const Arguments& a, const Waves& turns,
                                         const Rows<T>& rows, int64_t column) {
  Columns<T, width> sum = load_columns<T, width>(rows.token, column);
  const auto scale = static_cast<Compute<T>>(a.scale);
#pragma unroll
  for (int k = 0; k < width; ++k) sum.values[k] *= scale;
  add_columns<T, width>(rows.type, column, &sum);
  add_columns<T, width>(rows.position, column, &sum);
  add_wave<T, width>(a, turns, rows.position_index, column, &sum);
  if (rows.encoding != nullptr) {
#pragma unroll
    for (int k = 0; k < width; ++k) sum.values[k] += rows.encoding[column + k];
  }
  return sum;
}

}  // namespace
}  // namespace posembed::input
