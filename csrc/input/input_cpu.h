// The rows and dropout factors of a token in CPU kernels.
#pragma once

#include <cstdlib>
#include <new>

#include "core/block32.h"
#include "core/philox.h"
#include "core/stream.h"
#include "input/input.h"

namespace posembed::input::POSEMBED_ISA {

using core::Block32;
using core::Compute;

/// Memory for rows in the compute type. Does not use std::vector, because the linker could share
/// its members between instruction sets.
template <typename C>
class RowMemory {
 public:
  /// `rows` of at least `columns` elements, rounded up to whole blocks.
  RowMemory(int64_t rows, int64_t columns) : stride_(core::round_up_to_blocks(columns + 1)) {
    const auto bytes = static_cast<size_t>(rows * stride_) * sizeof(C);
    data_ = static_cast<C*>(std::aligned_alloc(64, bytes));
    if (data_ == nullptr) throw std::bad_alloc();
  }
  RowMemory(const RowMemory&) = delete;
  RowMemory& operator=(const RowMemory&) = delete;
  ~RowMemory() { std::free(data_); }

  C* row(int64_t number) const { return data_ + number * stride_; }

 private:
  int64_t stride_;
  C* data_;
};

/// A row of T as values in block order; a constant if there is no row.
template <typename T>
class ValueRow {
 public:
  using C = Compute<T>;

  ValueRow(const void* row, int64_t columns, C otherwise) : memory_(1, columns) {
    core::for_blocks(columns, [&](int64_t i, auto count) {
      const auto values = row == nullptr ? core::fill<T>(otherwise)
                                         : core::load_block(static_cast<const T*>(row) + i, count);
      core::store_values(values, memory_.row(0) + i);
    });
  }

  const C* values() const { return memory_.row(0); }

 private:
  RowMemory<C> memory_;
};

struct Token {
  int64_t batch, seq;
};

/// The token with a number. Tokens are numbered by seq index, then batch, so that consecutive
/// tokens share a position.
POSEMBED_INLINE Token token_at(const Arguments& a, int64_t number) {
  return {number % a.batch, number / a.batch};
}

/// The token after `token`, without token_at's division.
POSEMBED_INLINE Token after(const Arguments& a, const Token& token) {
  if (token.batch + 1 < a.batch) return {token.batch + 1, token.seq};
  return {0, token.seq + 1};
}

/// The token's index in [batch, seq].
POSEMBED_INLINE int64_t row_of(const Arguments& a, const Token& token) {
  return token.batch * a.seq + token.seq;
}

POSEMBED_INLINE int64_t row_index(const Table& table, const Token& token) {
  return row_index(table, token.batch, token.seq);
}

template <typename T>
POSEMBED_INLINE const T* table_row(const Table& table, const Token& token) {
  if (table.data == nullptr) return nullptr;
  const int64_t row = row_index(table, token) + table.first_row;
  return static_cast<const T*>(table.data) + row * table.stride;
}

/// A row of sinusoids in block order.
template <typename T>
class SinusoidRow {
 public:
  using C = Compute<T>;

  explicit SinusoidRow(const sinusoidal::Sinusoid& sinusoid)
      : sinusoid_(sinusoid), memory_(4, sinusoid.pairs == 0 ? 0 : sinusoid.layout.columns) {}

  /// Whether at(position) would overwrite the row that it last returned.
  bool changes(int64_t position) const {
    return sinusoid_.pairs != 0 && !(known_ && position == position_);
  }

  /// The row of `position`; nullptr without a sinusoid.
  const C* at(int64_t position) {
    if (sinusoid_.pairs == 0) return nullptr;
    if (changes(position)) fill(position);
    return memory_.row(0);
  }

 private:
  void fill(int64_t position) {
    const sinusoidal::Layout& layout = sinusoid_.layout;
    C *row = memory_.row(1), *sines = memory_.row(2), *cosines = memory_.row(3);
    const core::Position placed = sinusoidal::placed(sinusoid_, {position, 0, 1.0});
    sinusoidal::fill_waves(placed.whole, sinusoidal::turns_of<T>(sinusoid_), sinusoid_.pairs,
                           static_cast<C>(scale_of(sinusoid_) * placed.scale), sines, cosines);
    const C* first = layout.cos_first ? cosines : sines;
    const C* second = layout.cos_first ? sines : cosines;
    const int64_t columns = core::round_up_to_blocks(layout.columns);
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

/// The addresses of the rows of one token.
template <typename T>
struct RowPointers {
  const T* token = nullptr;
  const T* type = nullptr;
  const T* position = nullptr;
  const Compute<T>* sinusoid = nullptr;
  Compute<T> scale = 1;
  const T* soon = nullptr;  // the token row of a later token, to prefetch
};

/// Prefetches a block of a row into the L2 cache.
template <typename T>
POSEMBED_INLINE void prefetch_block(const T* row) {
  constexpr int64_t line = 64 / sizeof(T);
  for (int64_t k = 0; k < core::block_size; k += line) __builtin_prefetch(row + k, 0, 2);
}

/// Whether only an unscaled token row and a position row are summed. This is the most frequent case
/// and has separate loops, which do not test for other rows.
POSEMBED_INLINE bool is_plain(const Arguments& a) {
  return a.scale == 1 && a.type.data == nullptr && a.position.data != nullptr;
}

/// The sum of a token's rows from column i on, in BERT's order. `plain`: is_plain(arguments).
template <bool plain, typename T, typename Count>
POSEMBED_INLINE Block32<T> sum_at(const RowPointers<T>& rows, int64_t i, Count count) {
  prefetch_block(rows.soon + i);
  Block32<T> sum = core::load_block(rows.token + i, count);
  if constexpr (plain) return sum + core::load_block(rows.position + i, count);
  if (rows.scale != 1) sum = sum * rows.scale;
  if (rows.type != nullptr) sum = sum + core::load_block(rows.type + i, count);
  if (rows.position != nullptr) sum = sum + core::load_block(rows.position + i, count);
  if (rows.sinusoid != nullptr) sum = sum + core::load_values<T>(rows.sinusoid + i);
  return sum;
}

/// Iterates over tokens and finds their rows.
template <typename T>
class TokenIterator {
 public:
  /// Tokens [begin, end).
  TokenIterator(const Arguments& a, int64_t begin, int64_t end)
      : a_(a), left_(end - begin - distance), sinusoid_(a.sinusoid) {
    if (begin >= end) return;
    token_ = token_at(a, begin);
    soon_ = left_ > 0 ? token_at(a, begin + distance) : token_;
  }

  const Token& token() const { return token_; }

  /// The later token whose rows are prefetched.
  const Token& soon() const { return soon_; }

  /// Prefetches the pages of that token's row of `out` [batch, seq, embedding_dim].
  void expect(const T* out) const {
    const int64_t dim = a_.embedding_dim;
    core::expect_stream(out + row_of(a_, soon_) * dim, dim * static_cast<int64_t>(sizeof(T)));
  }

  /// Whether rows() computes a new row of sinusoids.
  bool computes_sinusoid() const { return sinusoid_.changes(row_index(a_.position, token_)); }

  /// The rows of the current token.
  RowPointers<T> rows() {
    return {table_row<T>(a_.token, token_),    table_row<T>(a_.type, token_),
            table_row<T>(a_.position, token_), sinusoid_.at(row_index(a_.position, token_)),
            static_cast<Compute<T>>(a_.scale), table_row<T>(a_.token, soon_)};
  }

  void advance() {
    token_ = after(a_, token_);
    if (--left_ > 0) soon_ = after(a_, soon_);
  }

 private:
  /// How many tokens ahead to prefetch, so that a row arrives from memory while earlier rows are
  /// processed.
  static constexpr int64_t distance = 8;

  const Arguments& a_;
  int64_t left_;  // tokens until soon_ is the last
  Token token_{}, soon_{};
  SinusoidRow<T> sinusoid_;
};

// ------------------------------------------------------------------------------------ drop factors
// Dropout's factors for a row. Each depends only on the seed and the element's index.

template <typename T>
class DropFactors {
 public:
  using C = Compute<T>;

  /// For rows of up to `columns` elements; without a seed there are no factors. `origin`: the index
  /// of element 0 in the mask.
  DropFactors(double probability, const int64_t* seed, int64_t origin, int64_t columns)
      : drops_(seed != nullptr),
        origin_(static_cast<uint64_t>(origin)),
        dropout_(core::make_dropout(probability, drops_ ? static_cast<uint64_t>(*seed) : 0)),
        words_(1, drops_ ? columns + 8 : 0),
        factors_(2, drops_ ? columns : 0) {}

  /// The factors of `columns` elements from `element` on, in block order; nullptr: all are 1.
  const C* at(int64_t element, int64_t columns) {
    if (!drops_) return nullptr;
    const uint64_t first = origin_ + static_cast<uint64_t>(element);
    draw(first, columns);
    const uint32_t* word = words_.row(0) + first % 4;
    C* factor = factors_.row(0);
    const auto scale = static_cast<C>(dropout_.scale);
    for (int64_t i = 0; i < columns; ++i) factor[i] = word[i] < dropout_.threshold ? C(0) : scale;
    const int64_t whole = core::round_up_to_blocks(columns);
    for (int64_t i = columns; i < whole; ++i) factor[i] = 0;
    core::order_values<T>(factor, whole, factors_.row(1));
    return factors_.row(1);
  }

 private:
  /// Philox draws four words at once, so up to three extra at either end.
  void draw(uint64_t first, int64_t columns) {
    const uint64_t counter = first / 4;
    const uint64_t calls = (first + static_cast<uint64_t>(columns) + 3) / 4 - counter;
    uint32_t* word = words_.row(0);
    for (uint64_t i = 0; i < calls; ++i, word += 4) {
      const core::Random4 random = core::philox(dropout_.seed, counter + i);
      for (int k = 0; k < 4; ++k) word[k] = random.words[k];
    }
  }

  bool drops_;
  uint64_t origin_;
  core::Dropout dropout_;
  RowMemory<uint32_t> words_;
  RowMemory<C> factors_;
};

}  // namespace posembed::input::POSEMBED_ISA
