// Sums of rows at arbitrary addresses, in float32 (float64 for float64). A block of columns stays
// in registers while rows are added, and later rows are prefetched. The order of a sum is the same
// on every instruction set: spans of 64 rows, then the spans' sums. Included only by kernels, once
// per instruction set.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/lane_sum.h"
#include "core/scalar.h"
#include "core/vector.h"

namespace posembed::core {
inline namespace POSEMBED_ISA {

/// How many rows ahead to prefetch into the L2 cache. Prefetches into L1 would delay the loads of
/// the sum itself.
inline constexpr int64_t rows_ahead = 16;

// A type `Rows` describes the input of a sum:
//   using Element;                               of the rows' elements
//   static constexpr bool weighted;              whether rows have factors
//   int64_t begin, end;                          the sum's rows
//   const Element* row(int64_t i) const;         row i
//   const Element* coming(int64_t i) const;      row i; some row where there is none
//   bool counts(int64_t i) const;                whether row i is part of the sum
//   Compute<Element> factor(int64_t i) const;    where weighted
template <typename Rows>
using ElementOf = typename Rows::Element;

/// 2 * pairs vectors of columns.
template <int pairs>
struct ColumnBlock {
  Floats values[2 * pairs];
};

template <int pairs, typename Rows>
POSEMBED_INLINE ColumnBlock<pairs> add_span(const Rows& rows, int64_t begin, int64_t end,
                                            int64_t column) {
  constexpr int64_t bytes = pairs * 2 * lanes * static_cast<int64_t>(sizeof(ElementOf<Rows>));
  ColumnBlock<pairs> sum = {};
  for (int64_t i = begin; i < end; ++i) {
    const char* coming = reinterpret_cast<const char*>(rows.coming(i + rows_ahead) + column);
#pragma GCC unroll 16
    for (int64_t at = 0; at < bytes; at += 64)
      __builtin_prefetch(coming + at, /*write=*/0, /*locality=*/2);
    if (!rows.counts(i)) continue;
    const ElementOf<Rows>* row = rows.row(i) + column;
#pragma GCC unroll 8
    for (int k = 0; k < pairs; ++k) {
      FloatPair value = load_pair(row + k * 2 * lanes);
      if constexpr (Rows::weighted) {
        const float factor = rows.factor(i);
        value = {value.first * factor, value.second * factor};
      }
      sum.values[2 * k] += value.first;
      sum.values[2 * k + 1] += value.second;
    }
  }
  return sum;
}

template <int pairs, bool streaming, typename Rows, typename Finish>
POSEMBED_INLINE void sum_block(const Rows& rows, int64_t column, const Finish& finish,
                               ElementOf<Rows>* out) {
  int64_t stop = std::min(rows.begin + span, rows.end);
  ColumnBlock<pairs> sum = add_span<pairs>(rows, rows.begin, stop, column);
  for (int64_t i = stop; i < rows.end; i = stop) {
    stop = std::min(i + span, rows.end);
    const ColumnBlock<pairs> part = add_span<pairs>(rows, i, stop, column);
    for (int k = 0; k < 2 * pairs; ++k) sum.values[k] += part.values[k];
  }
#pragma GCC unroll 8
  for (int k = 0; k < pairs; ++k) {
    store_pair<streaming>({finish(sum.values[2 * k]), finish(sum.values[2 * k + 1])},
                          out + column + k * 2 * lanes);
  }
}

inline constexpr int64_t narrow = 64;

/// The same for up to `narrow` columns and for float64, in loops that the compiler vectorises.
template <typename Rows, typename Width, typename Finish>
POSEMBED_INLINE void sum_columns(const Rows& rows, int64_t column, Width width,
                                 const Finish& finish, ElementOf<Rows>* out) {
  using C = Compute<ElementOf<Rows>>;
  C sum[narrow] = {};
  for (int64_t i = rows.begin; i < rows.end;) {
    const int64_t stop = std::min(i + span, rows.end);
    C part[narrow] = {};
    for (; i < stop; ++i) {
      if (!rows.counts(i)) continue;
      const ElementOf<Rows>* row = rows.row(i) + column;
      for (int64_t k = 0; k < width; ++k) {
        if constexpr (Rows::weighted) {
          part[k] += load(row[k]) * rows.factor(i);
        } else {
          part[k] += load(row[k]);
        }
      }
    }
    for (int64_t k = 0; k < width; ++k) sum[k] += part[k];
  }
  for (int64_t k = 0; k < width; ++k) store(finish(sum[k]), out + column + k);
}

/// Sums as many blocks of `pairs` as fit, starting at `column`, then narrower ones; returns the
/// column reached.
template <int pairs, bool streaming, typename Rows, typename Finish>
POSEMBED_INLINE int64_t sum_blocks(const Rows& rows, int64_t column, int64_t dim,
                                   const Finish& finish, ElementOf<Rows>* out) {
  constexpr int64_t width = pairs * 2 * lanes;
  for (; column + width <= dim; column += width) {
    sum_block<pairs, streaming>(rows, column, finish, out);
  }
  if constexpr (pairs > 1) {
    return sum_blocks<pairs / 2, streaming>(rows, column, dim, finish, out);
  }
  return column;
}

/// out[0, dim) = finish(sum of the rows), where the sum is never -0; with non-temporal stores if
/// `streaming`.
template <bool streaming, typename Rows, typename Finish>
void sum_rows(const Rows& source, int64_t dim, const Finish& finish, ElementOf<Rows>* out) {
  const Rows rows = source;  // a copy that no store can change
  int64_t column = 0;
  if constexpr (std::is_same_v<ElementOf<Rows>, double>) {
    for (; column + narrow <= dim; column += narrow) {
      sum_columns(rows, column, std::integral_constant<int64_t, narrow>{}, finish, out);
    }
  } else {
    // The widest block takes half of the registers.
    column = sum_blocks<static_cast<int>(lanes) / 2, streaming>(rows, 0, dim, finish, out);
  }
  if (column < dim) sum_columns(rows, column, dim - column, finish, out);
}

}  // namespace POSEMBED_ISA
}  // namespace posembed::core
