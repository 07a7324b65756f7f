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
  int64_t position_index = 0;
  bool valid = true;
};

/// Indices of a token: in the batch, in the sequence, and in [batch, seq].
struct TokenIndices {
  int64_t batch, seq, token;
};

/// The row of one table; nullptr for an index outside it, which the thread that `records` records.
template <typename T>
__device__ const T* table_row(const Arguments& a, const Table& table, int64_t index,
                              const TokenIndices& place, bool records, bool* valid) {
  if (table.data == nullptr) return nullptr;
  const auto row = static_cast<uint64_t>(index) + static_cast<uint64_t>(table.first_row);
  if (row >= static_cast<uint64_t>(table.rows)) {
    *valid = false;
    if (records) {
      record_error(a.error, table.kind, index, place.token, table.rows - table.first_row);
    }
    return nullptr;
  }
  return static_cast<const T*>(table.data) + static_cast<int64_t>(row) * table.stride;
}

/// The rows of token and type, for a token whose id is known.
template <typename T>
__device__ TokenRowPointers<T> token_rows(const Arguments& a, const TokenIndices& place, int64_t id,
                                          bool records) {
  TokenRowPointers<T> rows;
  rows.token = table_row<T>(a, a.token, id, place, records, &rows.valid);
  if (a.type.data != nullptr) rows.type_index = index_of(a.type, place.batch, place.seq);
  rows.type = table_row<T>(a, a.type, rows.type_index, place, records, &rows.valid);
  return rows;
}

/// Adds the row of the position.
template <typename T>
__device__ void find_position(const Arguments& a, const TokenIndices& place, bool records,
                              TokenRowPointers<T>* rows) {
  rows->position_index = index_of(a.position, place.batch, place.seq);
  rows->position = table_row<T>(a, a.position, rows->position_index, place, records, &rows->valid);
  if (a.encoding == nullptr) return;
  rows->encoding = static_cast<const Compute<T>*>(a.encoding) + place.batch * a.encoding_stride[0] +
                   place.seq * a.encoding_stride[1];
}

template <typename T>
__device__ TokenRowPointers<T> rows_of(const Arguments& a, const TokenIndices& place,
                                       bool records) {
  const int64_t id = index_of(a.token, place.batch, place.seq);
  TokenRowPointers<T> rows = token_rows<T>(a, place, id, records);
  find_position(a, place, records, &rows);
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

/// Adds the position's row or sinusoid.
template <typename T, int width>
__device__ void add_position(const TokenRowPointers<T>& rows, int64_t column,
                             Columns<T, width>* sum) {
  add_columns<T, width>(rows.position, column, sum);
  if (rows.encoding == nullptr) return;
  Columns<T, width> encoding;
  core::load_values<width>(rows.encoding + column, encoding.values);
#pragma unroll
  for (int k = 0; k < width; ++k) sum->values[k] += encoding.values[k];
}

/// The scaled row of the token.
template <typename T, int width>
__device__ Columns<T, width> token_columns(const TokenRowPointers<T>& rows, Compute<T> scale,
                                           int64_t column) {
  Columns<T, width> sum = load_columns<T, width>(rows.token, column);
  if (scale == 1) return sum;
#pragma unroll
  for (int k = 0; k < width; ++k) sum.values[k] *= scale;
  return sum;
}

/// The sum of token, type and position, in BERT's order.
template <typename T, int width>
__device__ Columns<T, width> sum_columns(const Arguments& a, const TokenRowPointers<T>& rows,
                                         int64_t column) {
  auto sum = token_columns<T, width>(rows, static_cast<Compute<T>>(a.scale), column);
  add_columns<T, width>(rows.type, column, &sum);
  add_position<T, width>(rows, column, &sum);
  return sum;
}

}  // namespace
}  // namespace posembed::input
