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

}  // namespace
}  // namespace posembed::input
