// What a token adds up: rows of tables, fetched ahead of their use, and the sinusoid of its
// position, which is made once where neighbours share it. Part of kernel_cpu.cpp.
#pragma once

#include <cstdlib>

#include "core/run.h"
#include "input/kernel.h"

namespace posembed::input::POSEMBED_ISA {

using core::Compute;
using core::Run;

/// Memory for rows in the arithmetic's type; std::vector's members would be shared between
/// instruction sets.
template <typename C>
class RowMemory {
 public:
  /// `rows` of `columns` elements and more, up to whole runs.
  RowMemory(int64_t rows, int64_t columns) : stride_(core::round_up_to_runs(columns + 1)) {
    const auto bytes = static_cast<size_t>(rows * stride_) * sizeof(C);
    data_ = static_cast<C*>(std::aligned_alloc(64, bytes));
  }
  RowMemory(const RowMemory&) = delete;
  RowMemory& operator=(const RowMemory&) = delete;
  ~RowMemory() { std::free(data_); }

  C* row(int64_t number) const { return data_ + number * stride_; }

 private:
  int64_t stride_;
  C* data_;
};

struct Token {
  int64_t batch, place;
};

/// Tokens are numbered place by place, so that neighbours share a position.
POSEMBED_INLINE Token token_at(const Arguments& a, int64_t number) {
  return {number % a.batch, number / a.batch};
}

/// The token's place in [batch, seq].
POSEMBED_INLINE int64_t row_of(const Arguments& a, const Token& token) {
  return token.batch * a.seq + token.place;
}

POSEMBED_INLINE int64_t index_of(const Table& table, const Token& token) {
  if (table.index.data == nullptr) return table.offset + token.place;
  return read(table.index,
              token.batch * table.index_stride[0] + token.place * table.index_stride[1]);
}

template <typename T>
POSEMBED_INLINE const T* table_row(const Table& table, const Token& token) {
  if (table.data == nullptr) return nullptr;
  const int64_t row = index_of(table, token) + table.first_row;
  return static_cast<const T*>(table.data) + row * table.stride;
}

/// A row of sinusoids in the order of runs.
template <typename T>
class Wave {
 public:
  using C = Compute<T>;

  explicit Wave(const sinusoidal::Sinusoid& sinusoid)
      : sinusoid_(sinusoid), memory_(4, sinusoid.pairs == 0 ? 0 : sinusoid.layout.columns) {}

  /// That of `position`; nullptr where there is no sinusoid.
  const C* at(int64_t position) {
    if (sinusoid_.pairs == 0) return nullptr;
    if (!known_ || position != position_) fill(position);
    return memory_.row(0);
  }

 private:
  void fill(int64_t position) {
    const sinusoidal::Layout& layout = sinusoid_.layout;
    C *row = memory_.row(1), *sines = memory_.row(2), *cosines = memory_.row(3);
    sinusoidal::fill_waves(position, sinusoidal::turns_of<T>(sinusoid_), sinusoid_.pairs,
                           static_cast<C>(scale_of(sinusoid_)), sines, cosines);
    const C* first = layout.cos_first ? cosines : sines;
    const C* second = layout.cos_first ? sines : cosines;
    const int64_t columns = core::round_up_to_runs(layout.columns);
    for (int64_t i = layout.filled; i < columns; ++i) row[i] = 0;
    const int64_t seconds = layout.filled - sinusoid_.pairs;
    const int64_t step = layout.interleaved ? 2 : 1;
    C* other = row + sinusoidal::second_column(layout, 0);
    for (int64_t i = 0; i < sinusoid_.pairs; ++i) row[i * step] = first[i];
    for (int64_t i = 0; i < seconds; ++i) other[i * step] = second[i];
    core::order_values<T>(row, columns, memory_.row(0));
    position_ = position;
    known_ = true;
  }

  const sinusoidal::Sinusoid& sinusoid_;
  RowMemory<C> memory_;
  bool known_ = false;
  int64_t position_ = 0;
};

/// The rows of one token.
template <typename T>
struct Rows {
  const T* token;
  const T* type;
  const T* position;
  const Compute<T>* wave;
  Compute<T> scale;
  const T* next;  // the token's row that is wanted soon
};

/// The sum of a token's rows from column i on, in the order in which BERT adds them.
template <typename T, typename Count>
POSEMBED_INLINE Run<T> sum_at(const Rows<T>& rows, int64_t i, Count count) {
  constexpr int64_t line = 64 / sizeof(T);
  for (int64_t k = 0; k < core::run; k += line) __builtin_prefetch(rows.next + i + k, 0, 2);
  Run<T> sum = core::load_run(rows.token + i, count) * rows.scale;
  if (rows.type != nullptr) sum = sum + core::load_run(rows.type + i, count);
  if (rows.position != nullptr) sum = sum + core::load_run(rows.position + i, count);
  if (rows.wave != nullptr) sum = sum + core::load_values<T>(rows.wave + i);
  return sum;
}

/// Finds the rows of tokens, one after the other.
template <typename T>
class TokenRows {
 public:
  /// Works on tokens up to `end`.
  TokenRows(const Arguments& a, int64_t end) : a_(a), end_(end), wave_(a.sinusoid) {}

  Rows<T> of(int64_t number) {
    const Token token = token_at(a_, number), next = token_at(a_, ahead(number));
    return {table_row<T>(a_.token, token),     table_row<T>(a_.type, token),
            table_row<T>(a_.position, token),  wave_.at(index_of(a_.position, token)),
            static_cast<Compute<T>>(a_.scale), table_row<T>(a_.token, next)};
  }

 private:
  /// Far enough for a row to arrive from memory while the rows before it are worked on.
  static constexpr int64_t distance = 6;

  int64_t ahead(int64_t number) const {
    return number + distance < end_ ? number + distance : end_ - 1;
  }

  const Arguments& a_;
  int64_t end_;
  Wave<T> wave_;
};

}  // namespace posembed::input::POSEMBED_ISA
