// Forward without a norm: adds rows in registers, four tokens at a time, because reading several
// pages in parallel is faster than one after another. Part of kernel_cpu.cpp.
#pragma once

#include "input/drop_factors.h"
#include "input/token_rows.h"

namespace posembed::input::POSEMBED_ISA {

/// `plain`: see sum_at.
template <typename T, bool plain, bool streaming>
class RowAdder {
 public:
  explicit RowAdder(int64_t dim) : dim_(dim) {}

  void add(const RowPointers<T>& rows, T* out) {
    rows_[count_] = rows;
    out_[count_++] = out;
    if (count_ == side_by_side) add_all();
  }

  void flush() {
    for (int64_t k = 0; k < count_; ++k) {
      core::for_blocks(dim_, [&](int64_t i, auto count) { add_block(k, i, count); });
    }
    count_ = 0;
  }

 private:
  static constexpr int64_t side_by_side = 4;
  /// Elements of a row to process before switching to the next row: 256 bytes.
  static constexpr int64_t step = 256 / sizeof(T);

  template <typename Count>
  void add_block(int64_t k, int64_t i, Count count) const {
    core::store_block<streaming>(sum_at<plain>(rows_[k], i, count), out_[k] + i, count);
  }

  void add_all() {
    const int64_t whole = dim_ - dim_ % step;
    for (int64_t first = 0; first < whole; first += step) {
#pragma GCC unroll 1
      for (int64_t k = 0; k < side_by_side; ++k) {
        for (int64_t i = 0; i < step; i += core::block_size)
          add_block(k, first + i, core::WholeBlock{});
      }
    }
#pragma GCC unroll 1
    for (int64_t k = 0; k < side_by_side; ++k) {
      core::for_blocks(dim_ - whole,
                       [&](int64_t i, auto count) { add_block(k, whole + i, count); });
    }
    count_ = 0;
  }

  int64_t dim_, count_ = 0;
  RowPointers<T> rows_[side_by_side];
  T* out_[side_by_side];
};

template <typename T, bool plain, bool streaming>
void add_tokens(const ForwardArguments& f, int64_t begin, int64_t end) {
  const Arguments& a = f.input;
  RowAdder<T, plain, streaming> adder(a.embedding_dim);
  TokenIterator<T> tokens(a, begin, end);
  for (int64_t number = begin; number < end; ++number, tokens.advance()) {
    // Only one row of sinusoids is kept: the next position overwrites it.
    if (tokens.computes_sinusoid()) adder.flush();
    if (streaming) tokens.expect(static_cast<const T*>(f.out));
    adder.add(tokens.rows(), static_cast<T*>(f.out) + row_of(a, tokens.token()) * a.embedding_dim);
  }
  adder.flush();
}

/// The same with dropout: one token at a time, because drawing random numbers takes most of the
/// time.
template <typename T, bool streaming>
void drop_tokens(const ForwardArguments& f, int64_t begin, int64_t end) {
  const Arguments& a = f.input;
  const int64_t dim = a.embedding_dim;
  TokenIterator<T> tokens(a, begin, end);
  DropFactors<T> drop(a.dropout, a.seed, a.first_element, dim);
  for (int64_t number = begin; number < end; ++number, tokens.advance()) {
    const int64_t row = row_of(a, tokens.token());
    const RowPointers<T> rows = tokens.rows();
    const Compute<T>* factors = drop.at(row * dim, dim);
    T* out = static_cast<T*>(f.out) + row * dim;
    core::for_blocks(dim, [&](int64_t i, auto count) {
      const Block32<T> sum = sum_at<false>(rows, i, count);
      core::store_block<streaming>(sum * core::load_values<T>(factors + i), out + i, count);
    });
  }
}

}  // namespace posembed::input::POSEMBED_ISA
