// Moves rows between arbitrary addresses, unchanged or times a factor. Moves eight rows in
// parallel, because one row at a time leaves memory bandwidth unused. Included only by kernels,
// once per instruction set.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/scalar.h"
#include "core/stream.h"
#include "core/vector.h"

namespace posembed::token::POSEMBED_ISA {
namespace {

using core::Compute;
using core::FloatPair;
using core::lanes;
using core::Words;

/// Elements of a row to move before switching to the next row: 128 bytes.
template <typename T>
constexpr int64_t step = 128 / static_cast<int64_t>(sizeof(T));

/// Moves a row unchanged.
template <typename T>
struct Copy {
  template <bool streaming>
  void move_step(const T* in, T* out) const {
    constexpr int64_t width = sizeof(Words) / sizeof(T);
    for (int64_t i = 0; i < step<T>; i += width) {
      core::store_vector<streaming>(core::load_vector<Words>(in + i), out + i);
    }
  }
  void move_rest(const T* in, T* out, int64_t count) const {
    memcpy(out, in, static_cast<size_t>(count) * sizeof(T));
  }
};

/// Moves a row as a sum of one term, which is never -0.
template <typename T>
struct CopySum {
  using Bits = std::conditional_t<sizeof(T) == 2, uint16_t,
                                  std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
  static constexpr Bits negative_zero = static_cast<Bits>(Bits{1} << (8 * sizeof(T) - 1));

  template <bool streaming>
  void move_step(const T* in, T* out) const {
    typedef Bits Vector __attribute__((vector_size(sizeof(Words))));
    constexpr int64_t width = sizeof(Words) / sizeof(T);
    for (int64_t i = 0; i < step<T>; i += width) {
      const auto value = (Vector)core::load_vector<Words>(in + i);
      core::store_vector<streaming>((Words)(value & (Vector)(value != negative_zero)), out + i);
    }
  }
  void move_rest(const T* in, T* out, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      Bits bits;
      memcpy(&bits, in + i, sizeof bits);
      if (bits == negative_zero) bits = 0;
      memcpy(out + i, &bits, sizeof bits);
    }
  }
};

/// Moves a row times `factor`; if `summing`, as a sum of one term, which is never -0.
template <typename T, bool summing>
struct Scale {
  Compute<T> factor;

  template <typename Number>
  Number scaled(Number value) const {
    return (summing ? value + Compute<T>{0} : value) * factor;
  }
  template <bool streaming>
  void move_step(const T* in, T* out) const {
    if constexpr (std::is_same_v<T, double>) {
      move_rest(in, out, step<T>);
    } else {
      for (int64_t i = 0; i < step<T>; i += 2 * lanes) {
        const FloatPair value = core::load_pair(in + i);
        core::store_pair<streaming>({scaled(value.first), scaled(value.second)}, out + i);
      }
    }
  }
  void move_rest(const T* in, T* out, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) core::store(scaled(core::load(in[i])), out + i);
  }
};

/// Collects rows to move and moves them together.
template <typename T, bool streaming, typename Move>
class RowMover {
 public:
  RowMover(int64_t dim, Move move)
      : dim_(dim), ahead_(std::min(dim - dim % step<T>, prefetch_ahead)), move_(move) {}

  void add(const T* from, T* to) {
    if (streaming) core::expect_stream(to, dim_ * static_cast<int64_t>(sizeof(T)));
    from_[count_] = from;
    to_[count_++] = to;
    if (count_ == 2 * side_by_side) move_first();
  }

  void flush() {
    if (count_ > side_by_side) move_first();
    for (int64_t row = 0; row < count_; ++row) {
      const int64_t next = std::min(row + 1, count_ - 1);
      move_together<1>(from_ + row, from_ + next, to_ + row);
    }
    count_ = 0;
  }

 private:
  // With this many random rows in parallel, moving is as fast as a copy. Short rows end before the
  // hardware prefetcher detects their direction, so the end of a row prefetches the next eight.
  static constexpr int64_t side_by_side = 8;
  static constexpr int64_t prefetch_ahead = 1024 / static_cast<int64_t>(sizeof(T));
  static constexpr int64_t line = 64 / static_cast<int64_t>(sizeof(T));

  /// Moves the first eight rows and prefetches those of the next eight that are known.
  void move_first() {
    move_together<side_by_side>(from_, from_ + std::min(side_by_side, count_ - side_by_side), to_);
    std::copy(from_ + side_by_side, from_ + count_, from_);
    std::copy(to_ + side_by_side, to_ + count_, to_);
    count_ -= side_by_side;
  }

  template <int64_t rows>
  void move_together(const T* const* from, const T* const* next, T* const* to) const {
    const T* in[rows];  // copies that no store can change
    const T* then[rows];
    T* out[rows];
    std::copy(from, from + rows, in);
    std::copy(next, next + rows, then);
    std::copy(to, to + rows, out);
    const Move move = move_;
    const int64_t dim = dim_, whole = dim - dim % step<T>, ahead = ahead_;
    for (int64_t i = 0; i < whole; i += step<T>) {
      const bool ends = i + ahead >= whole;
      const int64_t soon = ends ? i + ahead - whole : i + ahead;
#pragma GCC unroll 8
      for (int64_t row = 0; row < rows; ++row) {
        const T* coming = (ends ? then[row] : in[row]) + soon;
        __builtin_prefetch(coming, /*write=*/0, /*locality=*/2);
        __builtin_prefetch(coming + line, /*write=*/0, /*locality=*/2);
        move.template move_step<streaming>(in[row] + i, out[row] + i);
      }
    }
    for (int64_t row = 0; row < rows; ++row) {
      move.move_rest(in[row] + whole, out[row] + whole, dim - whole);
    }
  }

  int64_t dim_;
  int64_t ahead_;
  Move move_;
  int64_t count_ = 0;
  const T* from_[2 * side_by_side];
  T* to_[2 * side_by_side];
};

template <bool streaming, typename T>
void fill_with_zeros(T* out, int64_t count) {
  const auto bytes = count * static_cast<int64_t>(sizeof(T));
  if constexpr (streaming) {
    core::stream_zeros(out, bytes);
  } else {
    memset(out, 0, static_cast<size_t>(bytes));
  }
}

/// Whether rows of `dim` elements at `out` can be written with non-temporal stores.
template <typename T>
bool has_aligned_rows(const void* out, int64_t dim) {
  return core::is_aligned_to_vector(out) &&
         dim * static_cast<int64_t>(sizeof(T)) % static_cast<int64_t>(sizeof(Words)) == 0;
}

}  // namespace
}  // namespace posembed::token::POSEMBED_ISA
