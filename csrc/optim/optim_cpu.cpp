// One row after another; the next rows are prefetched, because they are anywhere in a large table.
#include <algorithm>

#include "core/lane_sum.h"
#include "optim/optim.h"

namespace posembed::optim::POSEMBED_ISA {
namespace {

using core::Compute;

constexpr int64_t rows_ahead = 8;
constexpr int64_t bytes_ahead = 4096;  // of a row; the hardware finds the rest
constexpr int64_t chunk = 256;         // columns that are converted together

POSEMBED_INLINE void prefetch(const void* row, int64_t bytes) {
  const char* at = static_cast<const char*>(row);
  for (int64_t i = 0; i < std::min(bytes, bytes_ahead); i += 64) __builtin_prefetch(at + i, 1, 2);
}

int64_t row_at(const Arguments& a, int64_t index) {
  return a.ids.data == nullptr ? index : core::read(a.ids, index);
}

template <typename T>
POSEMBED_INLINE void prefetch_row(const Arguments& a, int64_t row) {
  using C = Compute<T>;
  const int64_t state = a.dim * int64_t{sizeof(C)};
  prefetch(static_cast<T*>(a.weight) + row * a.weight_stride, a.dim * int64_t{sizeof(T)});
  if (a.first != nullptr) prefetch(static_cast<C*>(a.first) + row * a.dim, state);
  if (a.second == nullptr) return;
  prefetch(static_cast<C*>(a.second) + (a.second_of_rows ? row : row * a.dim),
           a.second_of_rows ? 1 : state);
}

/// Columns in the type of arithmetic. The pointers of moments that a rule does not have are null.
template <bool has_first, Second kind, typename C>
POSEMBED_INLINE void update_columns(const Update<C>& u, const Owed<C>& owed, C rate,
                                    C* POSEMBED_RESTRICT weight,
                                    const C* POSEMBED_RESTRICT gradient, C* POSEMBED_RESTRICT first,
                                    C* POSEMBED_RESTRICT second, int64_t count) {
  for (int64_t k = 0; k < count; ++k) {
    weight[k] = updated<has_first, kind>(u, owed, rate, weight[k], gradient[k],
                                         has_first ? first + k : nullptr,
                                         kind == Second::element ? second + k : nullptr);
  }
}

/// Columns of a bfloat16 row, through a buffer of float32.
struct Columns {
  const Arguments& a;
  int64_t row, begin, count;

  core::BFloat16* weight() const {
    return static_cast<core::BFloat16*>(a.weight) + row * a.weight_stride + begin;
  }
  int16_t* remainder() const { return a.remainder + row * a.dim + begin; }

  void read(float* POSEMBED_RESTRICT out) const {
    const core::BFloat16* in = weight();
    if (a.store == Store::remainder) {
      const int16_t* rest = remainder();
      for (int64_t k = 0; k < count; ++k) out[k] = joined(in[k], rest[k]);
    } else {
      for (int64_t k = 0; k < count; ++k) out[k] = core::load(in[k]);
    }
  }

  void write(const float* POSEMBED_RESTRICT in) const {
    core::BFloat16* POSEMBED_RESTRICT out = weight();
    if (a.store == Store::remainder) {
      int16_t* POSEMBED_RESTRICT rest = remainder();
      for (int64_t k = 0; k < count; ++k) split(in[k], out + k, rest + k);
    } else if (a.store == Store::stochastic) {
      for (int64_t k = 0; k < count; k += 8) {
        const core::Random4 random = random_block(a, row, (begin + k) / 8);
        for (int64_t i = k; i < std::min(k + 8, count); ++i) {
          out[i] = round_randomly(in[i], random_half(random, i));
        }
      }
    } else {
      for (int64_t k = 0; k < count; ++k) core::store(in[k], out + k);
    }
  }
};

template <typename T, typename G, bool has_first, Second kind>
void step_rows(const Arguments& a, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const auto u = Update<C>::of(a.numbers);
  for (int64_t index = begin; index < end; ++index) {
    prefetch_row<T>(a, row_at(a, std::min(index + rows_ahead, end - 1)));
    const int64_t row = row_at(a, index);
    const G* gradient = static_cast<const G*>(a.gradient) + index * a.gradient_stride;
    const Owed<C> owed = owed_of<C>(a, index);
    C* first = has_first ? static_cast<C*>(a.first) + row * a.dim : nullptr;
    C* second = kind == Second::element ? static_cast<C*>(a.second) + row * a.dim : nullptr;
    C rate = u.rate;
    if constexpr (kind == Second::row) {
      const C squares = core::lane_sum<C>(a.dim, [&](int64_t k) {
        const C value = core::load(gradient[k]);
        return value * value;
      });
      rate = rate_of_row(u, squares, a.dim, static_cast<C*>(a.second) + row);
    }
    if constexpr (std::is_same_v<T, C>) {
      T* weight = static_cast<T*>(a.weight) + row * a.weight_stride;
      update_columns<has_first, kind>(u, owed, rate, weight, gradient, first, second, a.dim);
    } else {
      float weight[chunk], wide[chunk];
      for (int64_t column = 0; column < a.dim; column += chunk) {
        const Columns columns{a, row, column, std::min(chunk, a.dim - column)};
        columns.read(weight);
        for (int64_t k = 0; k < columns.count; ++k) wide[k] = core::load(gradient[column + k]);
        update_columns<has_first, kind>(
            u, owed, rate, weight, wide, has_first ? first + column : nullptr,
            kind == Second::element ? second + column : nullptr, columns.count);
        columns.write(weight);
      }
    }
  }
}

}  // namespace

void step(const Arguments& arguments, int64_t begin, int64_t end) {
  visit_types(arguments, [&](auto weight, auto gradient) {
    visit_moments(arguments, [&](auto has_first, auto second) {
      step_rows<typename decltype(weight)::type, typename decltype(gradient)::type, has_first.value,
                second.value>(arguments, begin, end);
    });
  });
}

}  // namespace posembed::optim::POSEMBED_ISA
