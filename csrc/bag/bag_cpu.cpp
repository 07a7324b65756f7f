// Pools bags on the CPU: sums by rows, maxima by blocks of columns, with later rows prefetched. The
// order of a sum depends neither on the instruction set nor on threads.
#include <algorithm>
#include <type_traits>

#include "bag/bag.h"
#include "core/lane_sum.h"
#include "core/row_sum.h"

namespace posembed::bag::POSEMBED_ISA {
namespace {

using core::Compute;
using core::load;
using core::store;

constexpr int64_t block = 64;
constexpr int64_t prefetch_distance = 4;
constexpr int64_t cache_line = 64;

template <typename T, typename Arguments>
const T* row_of(const Arguments& a, int64_t index) {
  return static_cast<const T*>(a.table) + read(a.bags.ids, index) * a.table_stride;
}

bool counts(const Bags& bags, int64_t index) { return read(bags.ids, index) != bags.padding_idx; }

/// Always inlined, because GCC drops calls of functions that only prefetch.
template <typename T>
POSEMBED_INLINE void prefetch_block(const PoolArguments& a, int64_t index, int64_t column) {
  if (index >= a.bags.count) return;
  const char* row = reinterpret_cast<const char*>(row_of<T>(a, index) + column);
  const int64_t bytes = std::min(a.embedding_dim - column, block) * static_cast<int64_t>(sizeof(T));
  for (int64_t at = 0; at < bytes; at += cache_line) __builtin_prefetch(row + at);
}

/// Visits, in order, the ids of `range` that are not padding, and prefetches the same columns of
/// later rows, whose random addresses the hardware cannot predict.
template <typename T, typename Function>
void for_rows(const PoolArguments& a, Range range, int64_t column, const Function& function) {
  for (int64_t index = range.begin; index < range.end; ++index) {
    prefetch_block<T>(a, index + prefetch_distance, column);
    if (counts(a.bags, index)) function(index, row_of<T>(a, index) + column);
  }
}

/// The rows of a bag, times the weights of its ids if `has_weights`.
template <typename T, bool has_weights>
struct BagRows {
  using Element = T;
  static constexpr bool weighted = has_weights;

  const T* table;
  int64_t stride;
  const T* weights;
  core::IndexView ids;
  int64_t padding_idx;
  int64_t begin, end;
  int64_t last;  // index of the last row that may be prefetched

  const T* row(int64_t index) const { return table + read(ids, index) * stride; }
  const T* coming(int64_t index) const { return row(std::min(index, last)); }
  bool counts(int64_t index) const { return read(ids, index) != padding_idx; }
  Compute<T> factor(int64_t index) const { return load(weights[index]); }
};

struct Identity {
  template <typename Number>
  Number operator()(Number sum) const {
    return sum;
  }
};

template <typename C>
struct DivideBy {
  C divisor;

  template <typename Number>
  Number operator()(Number sum) const {
    return sum / divisor;
  }
};

int64_t count_ids(const Bags& bags, Range range) {
  int64_t kept = 0;
  for (int64_t index = range.begin; index < range.end; ++index) kept += counts(bags, index);
  return kept;
}

template <typename T, bool weighted>
void add_rows(const PoolArguments& a, int64_t bag) {
  const Range range = range_of(a.bags, bag);
  const BagRows<T, weighted> rows{static_cast<const T*>(a.table),
                                  a.table_stride,
                                  static_cast<const T*>(a.weights),
                                  a.bags.ids,
                                  a.bags.padding_idx,
                                  range.begin,
                                  range.end,
                                  a.bags.count - 1};
  T* out = static_cast<T*>(a.out) + bag * a.embedding_dim;
  if (a.mode == Mode::mean) {
    const int64_t kept = std::max<int64_t>(1, count_ids(a.bags, range));
    const DivideBy<Compute<T>> finish{static_cast<Compute<T>>(kept)};
    core::sum_rows</*streaming=*/false>(rows, a.embedding_dim, finish, out);
  } else {
    core::sum_rows</*streaming=*/false>(rows, a.embedding_dim, Identity{}, out);
  }
}

/// Of equal maxima the first wins; NaN is greater than all numbers.
template <typename T, typename Width>
void compare_columns(const PoolArguments& a, int64_t bag, int64_t column, Width width) {
  const Range range = range_of(a.bags, bag);
  T* out = static_cast<T*>(a.out) + bag * a.embedding_dim;
  Compute<T> best[block] = {};
  int64_t at[block];
  std::fill_n(at, block, int64_t{-1});
  for_rows<T>(a, range, column, [&](int64_t index, const T* row) {
    for (int64_t i = 0; i < width; ++i) {
      const Compute<T> value = load(row[i]);
      const bool greater = (at[i] < 0) | (value > best[i]) | (value != value);
      best[i] = greater ? value : best[i];
      at[i] = greater ? index : at[i];
    }
  });
  for (int64_t i = 0; i < width; ++i) store(best[i], out + column + i);
  if (a.max_indices == nullptr) return;
  std::copy_n(at, static_cast<int64_t>(width), a.max_indices + bag * a.embedding_dim + column);
}

template <typename T>
void compare_rows(const PoolArguments& a, int64_t bag) {
  int64_t column = 0;
  for (; column + block <= a.embedding_dim; column += block) {
    compare_columns<T>(a, bag, column, std::integral_constant<int64_t, block>{});
  }
  if (column < a.embedding_dim) compare_columns<T>(a, bag, column, a.embedding_dim - column);
}

template <typename T>
void pool_bag(const PoolArguments& a, int64_t bag) {
  if (a.mode == Mode::max) return compare_rows<T>(a, bag);
  if (a.weights != nullptr) return add_rows<T, true>(a, bag);
  add_rows<T, false>(a, bag);
}

/// Calls function(index, bag) for the ids [begin, end).
template <typename Function>
void for_bags(const Bags& bags, int64_t begin, int64_t end, const Function& function) {
  int64_t bag = bag_of(bags, begin);
  for (int64_t index = begin; index < end; ++index) {
    while (bag + 1 < bags.bags && range_of(bags, bag + 1).begin <= index) ++bag;
    function(index, bag);
  }
}

template <typename T>
void spread_row(const SpreadArguments& a, int64_t index, int64_t bag, T* POSEMBED_RESTRICT out) {
  const int64_t dim = a.embedding_dim;
  if (bag < 0) {
    std::fill_n(out, dim, T{});
    return;
  }
  const T* POSEMBED_RESTRICT row = static_cast<const T*>(a.gradient) + bag * dim;
  const int64_t* chosen = a.max_indices + bag * dim;
  for (int64_t i = 0; i < dim; ++i) out[i] = chosen[i] == index ? row[i] : T{};
}

}  // namespace

void pool(const PoolArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    for (int64_t bag = begin; bag < end; ++bag)
      pool_bag<typename decltype(tag)::type>(arguments, bag);
  });
}

void find_bags(const FindArguments& arguments, int64_t begin, int64_t end) {
  for_bags(arguments.bags, begin, end, [&](int64_t index, int64_t bag) {
    arguments.out[index] = static_cast<uint32_t>(std::max<int64_t>(0, bag));
  });
}

void spread(const SpreadArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_bags(arguments.bags, begin, end, [&](int64_t index, int64_t bag) {
      spread_row(arguments, index, bag,
                 static_cast<T*>(arguments.out) + index * arguments.embedding_dim);
    });
  });
}

void dot(const DotArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t dim = arguments.embedding_dim;
    for_bags(arguments.bags, begin, end, [&](int64_t index, int64_t bag) {
      Compute<T> sum = 0;
      if (bag >= 0 && counts(arguments.bags, index)) {
        const T* gradient = static_cast<const T*>(arguments.gradient) + bag * dim;
        const T* row = row_of<T>(arguments, index);
        sum = core::lane_sum<Compute<T>>(
            dim, [&](int64_t i) { return load(gradient[i]) * load(row[i]); });
      }
      store(sum, static_cast<T*>(arguments.out) + index);
    });
  });
}

}  // namespace posembed::bag::POSEMBED_ISA
