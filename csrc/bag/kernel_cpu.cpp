// A block of columns of a bag stays in registers while its rows pass by; the rows of later places
// are prefetched. Sums have one order, whatever the instruction set and the number of threads.
#include <algorithm>
#include <type_traits>

#include "bag/kernel.h"
#include "core/lane_sum.h"

namespace posembed::bag::POSEMBED_ISA {
namespace {

using core::Compute;
using core::load;
using core::store;

constexpr int64_t block = 64;
constexpr int64_t prefetch_distance = 4;
constexpr int64_t cache_line = 64;

template <typename T, typename Arguments>
const T* row_of(const Arguments& a, int64_t place) {
  return static_cast<const T*>(a.table) + read(a.bags.ids, place) * a.table_stride;
}

bool counts(const Bags& bags, int64_t place) { return read(bags.ids, place) != bags.padding_idx; }

template <typename T>
void prefetch_row(const PoolArguments& a, int64_t place) {
  if (place >= a.bags.count) return;
  const char* row = reinterpret_cast<const char*>(row_of<T>(a, place));
  const int64_t bytes = a.embedding_dim * static_cast<int64_t>(sizeof(T));
  for (int64_t at = 0; at < bytes; at += cache_line) __builtin_prefetch(row + at);
}

/// The places of `range` that count, in order; the rows of those to come are on their way while the
/// first columns are read.
template <typename T, typename Function>
void for_places(const PoolArguments& a, Range range, int64_t column, const Function& function) {
  for (int64_t place = range.begin; place < range.end; ++place) {
    if (column == 0) prefetch_row<T>(a, place + prefetch_distance);
    if (counts(a.bags, place)) function(place, row_of<T>(a, place) + column);
  }
}

// `width` is `block` everywhere but at a row's end: a constant there lets the compiler unroll.
template <typename T, bool weighted, typename Width>
void add_columns(const PoolArguments& a, Range range, int64_t column, Width width, T* out) {
  using C = Compute<T>;
  const auto* weights = static_cast<const T*>(a.weights);
  C total[block] = {};
  int64_t kept = 0;
  for (int64_t first = range.begin; first < range.end; first += span) {
    C part[block] = {};
    for_places<T>(a, {first, std::min(first + span, range.end)}, column,
                  [&](int64_t place, const T* row) {
                    const C factor = weighted ? load(weights[place]) : C(1);
                    for (int64_t i = 0; i < width; ++i) {
                      part[i] += weighted ? load(row[i]) * factor : C(load(row[i]));
                    }
                    ++kept;
                  });
    for (int64_t i = 0; i < width; ++i) total[i] += part[i];
  }
  const C divisor = a.mode == Mode::mean && kept > 1 ? static_cast<C>(kept) : C(1);
  for (int64_t i = 0; i < width; ++i) store(total[i] / divisor, out + column + i);
}

/// The first of equal maxima counts; a NaN is greater than everything.
template <typename T, typename Width>
void compare_columns(const PoolArguments& a, Range range, int64_t bag, int64_t column, Width width,
                     T* out) {
  Compute<T> best[block] = {};
  int64_t at[block];
  std::fill_n(at, block, int64_t{-1});
  for_places<T>(a, range, column, [&](int64_t place, const T* row) {
    for (int64_t i = 0; i < width; ++i) {
      const Compute<T> value = load(row[i]);
      const bool greater = (at[i] < 0) | (value > best[i]) | (value != value);
      best[i] = greater ? value : best[i];
      at[i] = greater ? place : at[i];
    }
  });
  for (int64_t i = 0; i < width; ++i) store(best[i], out + column + i);
  if (a.places == nullptr) return;
  std::copy_n(at, static_cast<int64_t>(width), a.places + bag * a.embedding_dim + column);
}

template <typename T, typename Width>
void pool_columns(const PoolArguments& a, int64_t bag, int64_t column, Width width) {
  T* out = static_cast<T*>(a.out) + bag * a.embedding_dim;
  const Range range = range_of(a.bags, bag);
  if (a.mode == Mode::max) {
    compare_columns<T>(a, range, bag, column, width, out);
  } else if (a.weights != nullptr) {
    add_columns<T, true>(a, range, column, width, out);
  } else {
    add_columns<T, false>(a, range, column, width, out);
  }
}

template <typename T>
void pool_bag(const PoolArguments& a, int64_t bag) {
  int64_t column = 0;
  for (; column + block <= a.embedding_dim; column += block) {
    pool_columns<T>(a, bag, column, std::integral_constant<int64_t, block>{});
  }
  if (column < a.embedding_dim) pool_columns<T>(a, bag, column, a.embedding_dim - column);
}

/// Calls function(place, bag) for places [begin, end).
template <typename Function>
void for_bags(const Bags& bags, int64_t begin, int64_t end, const Function& function) {
  int64_t bag = bag_of(bags, begin);
  for (int64_t place = begin; place < end; ++place) {
    while (bag + 1 < bags.bags && range_of(bags, bag + 1).begin <= place) ++bag;
    function(place, bag);
  }
}

template <typename T>
void spread_row(const SpreadArguments& a, int64_t place, int64_t bag, T* POSEMBED_RESTRICT out) {
  const int64_t dim = a.embedding_dim;
  if (bag < 0) {
    std::fill_n(out, dim, T{});
    return;
  }
  const T* POSEMBED_RESTRICT row = static_cast<const T*>(a.gradient) + bag * dim;
  if (a.places != nullptr) {
    const int64_t* chosen = a.places + bag * dim;
    for (int64_t i = 0; i < dim; ++i) out[i] = chosen[i] == place ? row[i] : T{};
  } else if (a.weights != nullptr) {
    const Compute<T> factor = load(static_cast<const T*>(a.weights)[place]);
    for (int64_t i = 0; i < dim; ++i) store(load(row[i]) * factor, out + i);
  } else {
    std::copy_n(row, dim, out);
  }
}

}  // namespace

void pool(const PoolArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    for (int64_t bag = begin; bag < end; ++bag)
      pool_bag<typename decltype(tag)::type>(arguments, bag);
  });
}

void spread(const SpreadArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_bags(arguments.bags, begin, end, [&](int64_t place, int64_t bag) {
      spread_row(arguments, place, bag,
                 static_cast<T*>(arguments.out) + place * arguments.embedding_dim);
    });
  });
}

void dot(const DotArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t dim = arguments.embedding_dim;
    for_bags(arguments.bags, begin, end, [&](int64_t place, int64_t bag) {
      Compute<T> sum = 0;
      if (bag >= 0 && counts(arguments.bags, place)) {
        const T* gradient = static_cast<const T*>(arguments.gradient) + bag * dim;
        const T* row = row_of<T>(arguments, place);
        sum = core::lane_sum<Compute<T>>(
            dim, [&](int64_t i) { return load(gradient[i]) * load(row[i]); });
      }
      store(sum, static_cast<T*>(arguments.out) + place);
    });
  });
}

}  // namespace posembed::bag::POSEMBED_ISA
