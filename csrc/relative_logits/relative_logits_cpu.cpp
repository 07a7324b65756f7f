// Rows of neighbouring keys are mostly equal or consecutive. Sums of such a block need no address
// for each key.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/block32.h"
#include "core/block32_sum.h"
#include "relative_logits/relative_logits.h"

namespace posembed::relative_logits::POSEMBED_ISA {
namespace {

using core::Compute;

/// Values of a block of keys, in memory order.
template <typename T>
struct Values {
  alignas(64) Compute<T> value[core::block_size] = {};
};

template <typename T, typename Count>
POSEMBED_INLINE void store_elements(const Values<T>& values, T* out, Count count) {
  if constexpr (std::is_same_v<T, core::BFloat16>) {
    for (int64_t i = 0; i < count; ++i) core::store(values.value[i], out + i);
  } else {
    core::store_block(core::load_values<T>(values.value), out, count);
  }
}

/// The numbers of a matrix from the row of `query` on.
template <typename T>
T* line_of(void* matrix, const int64_t* stride, int64_t query) {
  return matrix == nullptr ? nullptr : static_cast<T*>(matrix) + query * stride[2];
}

/// The products of a query, or of the first key.
template <typename T, bool by_key>
Compute<T>* products_of(const Block& b, int64_t query) {
  return static_cast<Compute<T>*>(b.products) + (by_key ? 0 : query * b.row_count);
}

template <typename T, bool by_key>
void gather_line(const Block& b, int64_t query) {
  using C = Compute<T>;
  const auto scale = static_cast<C>(b.scale);
  const T* scores = line_of<T>(const_cast<void*>(b.scores), b.score_stride, query);
  T* out = line_of<T>(b.out, b.out_stride, query);
  core::for_blocks(b.keys, [&](int64_t first, auto count) POSEMBED_INLINE_LAMBDA {
    Values<T> sum;
    if (scores != nullptr) core::load_elements(scores + first, count, sum.value);
    for (int64_t axis = 0; axis < b.axes; ++axis) {
      const int32_t* rows = b.rows + axis * b.row_stride[0] + query * b.row_stride[2] + first;
      const C* products = products_of<T, by_key>(b, query) + (by_key ? first * b.row_count : 0);
      for (int64_t i = 0; i < count; ++i) {
        // Read for every key, so that the loop has no branch.
        const int64_t row = std::max<int64_t>(rows[i] - b.first_row, 0);
        const C logit = scale * products[(by_key ? i * b.row_count : 0) + row];
        const C total = sum.value[i] + (rows[i] < 0 ? C(0) : logit);
        sum.value[i] = rows[i] == hidden_row ? -static_cast<C>(INFINITY) : total;
      }
    }
    store_elements(sum, out + first, count);
  });
}

/// Whether rows[i] == rows[0] + i * step for all rows of a whole block.
POSEMBED_INLINE bool advance_by(const int32_t* rows, int32_t step) {
  bool result = true;
  for (int32_t i = 0; i < core::block_size; ++i) result &= rows[i] == rows[0] + i * step;
  return result;
}

/// Adds the values of a whole block to sums of consecutive rows; false if rows differ otherwise.
template <typename T>
POSEMBED_INLINE bool add_run(const int32_t* rows, const Values<T>& values, Compute<T>* sums,
                             int64_t first_row) {
  constexpr int64_t last = core::block_size - 1;
  if (rows[0] < 0 || rows[last] < 0) return false;
  Compute<T>* sum = sums + (std::min(rows[0], rows[last]) - first_row);
  if (rows[0] == rows[last]) {
    if (!advance_by(rows, 0)) return false;
    *sum += core::sum(core::load_values<Compute<T>>(values.value));
    return true;
  }
  const bool up = rows[last] - rows[0] == last;
  if (!up && rows[0] - rows[last] != last) return false;
  if (!advance_by(rows, up ? 1 : -1)) return false;
  if (up) {
    for (int64_t i = 0; i <= last; ++i) sum[i] += values.value[i];
  } else {
    for (int64_t i = 0; i <= last; ++i) sum[i] += values.value[last - i];
  }
  return true;
}

template <typename T, bool by_key>
void scatter_line(const Block& b, int64_t query) {
  const auto scale = static_cast<Compute<T>>(b.scale);
  const T* scores = line_of<T>(const_cast<void*>(b.scores), b.score_stride, query);
  Compute<T>* products = products_of<T, by_key>(b, query);
  for (int64_t axis = 0; axis < b.axes; ++axis) {
    core::for_blocks(b.keys, [&](int64_t first, auto count) POSEMBED_INLINE_LAMBDA {
      Values<T> values;
      core::load_elements(scores + first, count, values.value);
      for (Compute<T>& value : values.value) value *= scale;
      const int32_t* rows = b.rows + axis * b.row_stride[0] + query * b.row_stride[2] + first;
      const bool whole = std::is_same_v<decltype(count), core::WholeBlock>;
      if (!by_key && whole && add_run<T>(rows, values, products, b.first_row)) return;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t place = by_key ? (first + i) * b.row_count : 0;
        if (rows[i] >= 0) products[place + rows[i] - b.first_row] += values.value[i];
      }
    });
  }
}

}  // namespace

void narrow_rows(Block& block) {
  int32_t low = std::numeric_limits<int32_t>::max(), high = 0;
  for (int64_t axis = 0; axis < block.axes; ++axis) {
    for (int64_t query = 0; query < block.queries; ++query) {
      const int32_t* rows = block.rows + axis * block.row_stride[0] + query * block.row_stride[2];
      for (int64_t key = 0; key < block.keys; ++key) {
        low = std::min(low, rows[key] < 0 ? low : rows[key]);
        high = std::max(high, rows[key]);
      }
    }
  }
  block.first_row = low > high ? 0 : low;
  block.row_count = low > high ? 1 : high - low + 1;
}

void gather(const Block& block) {
  core::visit_scalar(block.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto of_line = block.by_key ? gather_line<T, true> : gather_line<T, false>;
    for (int64_t query = 0; query < block.queries; ++query) of_line(block, query);
  });
}

void scatter(const Block& block) {
  core::visit_scalar(block.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto of_line = block.by_key ? scatter_line<T, true> : scatter_line<T, false>;
    for (int64_t query = 0; query < block.queries; ++query) of_line(block, query);
  });
}

}  // namespace posembed::relative_logits::POSEMBED_ISA
