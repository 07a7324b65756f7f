// Rows of neighbouring keys are mostly equal or consecutive. Sums of such a block need no address
// for each key.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/block32.h"
#include "core/block32_sum.h"
#include "relative_logits/kernel.h"

namespace posembed::relative_logits::POSEMBED_ISA {
namespace {

using core::Compute;

/// The keys of a query: their rows on one axis, and the products of its place, or of the first key.
template <typename T>
struct Line {
  const int32_t* rows;
  const T* scores;
  T* out;
  Compute<T>* products;
};

template <typename T>
Line<T> line_of(const Block& b, int64_t batch, int64_t head, int64_t query) {
  const auto offset = [&](const int64_t* stride) {
    return batch * stride[0] + head * stride[1] + query * stride[2];
  };
  const int64_t places = b.by_key ? b.keys : b.queries;
  const int64_t place = (batch * b.heads + head) * places + (b.by_key ? 0 : query);
  Line<T> line;
  line.rows = b.rows + batch * b.row_stride[1] + query * b.row_stride[2];
  line.scores =
      b.scores == nullptr ? nullptr : static_cast<const T*>(b.scores) + offset(b.score_stride);
  line.out = b.out == nullptr ? nullptr : static_cast<T*>(b.out) + offset(b.out_stride);
  line.products = static_cast<Compute<T>*>(b.products) + place * b.row_count;
  return line;
}

template <typename T, typename Visit>
void for_each_line(const Block& b, const Visit& visit) {
  for (int64_t batch = 0; batch < b.batch; ++batch) {
    for (int64_t head = 0; head < b.heads; ++head) {
      for (int64_t query = 0; query < b.queries; ++query) {
        visit(line_of<T>(b, batch, head, query));
      }
    }
  }
}

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

template <typename T, bool by_key>
void gather_line(const Block& b, const Line<T>& line) {
  using C = Compute<T>;
  const auto scale = static_cast<C>(b.scale);
  core::for_blocks(b.keys, [&](int64_t first, auto count) POSEMBED_INLINE_LAMBDA {
    Values<T> sum;
    if (line.scores != nullptr) core::load_elements(line.scores + first, count, sum.value);
    for (int64_t axis = 0; axis < b.axes; ++axis) {
      const int32_t* rows = line.rows + axis * b.row_stride[0] + first;
      const C* products = line.products + (by_key ? first * b.row_count : 0);
      for (int64_t i = 0; i < count; ++i) {
        // Read for every key, so that the loop has no branch.
        const int64_t row = std::max<int64_t>(rows[i] - b.first_row, 0);
        const C logit = scale * products[(by_key ? i * b.row_count : 0) + row];
        const C total = sum.value[i] + (rows[i] < 0 ? C(0) : logit);
        sum.value[i] = rows[i] == hidden_row ? -static_cast<C>(INFINITY) : total;
      }
    }
    store_elements(sum, line.out + first, count);
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
void scatter_line(const Block& b, const Line<T>& line) {
  const auto scale = static_cast<Compute<T>>(b.scale);
  for (int64_t axis = 0; axis < b.axes; ++axis) {
    core::for_blocks(b.keys, [&](int64_t first, auto count) POSEMBED_INLINE_LAMBDA {
      Values<T> values;
      core::load_elements(line.scores + first, count, values.value);
      for (Compute<T>& value : values.value) value *= scale;
      const int32_t* rows = line.rows + axis * b.row_stride[0] + first;
      const bool whole = std::is_same_v<decltype(count), core::WholeBlock>;
      if (!by_key && whole && add_run<T>(rows, values, line.products, b.first_row)) return;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t place = by_key ? (first + i) * b.row_count : 0;
        if (rows[i] >= 0) line.products[place + rows[i] - b.first_row] += values.value[i];
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
    for_each_line<T>(block, [&](const Line<T>& line) { of_line(block, line); });
  });
}

void scatter(const Block& block) {
  core::visit_scalar(block.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto of_line = block.by_key ? scatter_line<T, true> : scatter_line<T, false>;
    for_each_line<T>(block, [&](const Line<T>& line) { of_line(block, line); });
  });
}

}  // namespace posembed::relative_logits::POSEMBED_ISA
