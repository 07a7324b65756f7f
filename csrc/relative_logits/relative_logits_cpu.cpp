// The rows of neighbouring keys are mostly equal or consecutive: on a grid's axis in each of its
// rows, and in wide buckets. Such runs need no address for each key.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/block32.h"
#include "relative_logits/relative_logits.h"

namespace posembed::relative_logits::POSEMBED_ISA {
namespace {

using core::Compute;

/// Shorter runs are read key by key.
constexpr int64_t shortest_run = 8;

/// The length of the run that begins with rows[0], and its step.
Run run_of(const int32_t* rows, int64_t keys) {
  const int32_t step = keys > 1 ? rows[1] - rows[0] : 0;
  if (step < -1 || step > 1 || (step != 0 && rows[0] < 0)) return {1, rows[0], 0};
  int64_t end = 1;
  while (end < keys && rows[end] - rows[end - 1] == step && (step == 0 || rows[end] >= 0)) ++end;
  return {static_cast<int32_t>(end), rows[0], step};
}

/// Sets the first and last row of a line.
void find_bounds(const int32_t* rows, int64_t keys, QueryRows& line) {
  line.low = std::numeric_limits<int32_t>::max();
  line.high = -1;
  for (int64_t key = 0; key < keys; ++key) {
    line.low = std::min(line.low, rows[key] < 0 ? line.low : rows[key]);
    line.high = std::max(line.high, rows[key]);
  }
}

const int32_t* rows_of(const Block& b, int64_t axis, int64_t query) {
  return b.rows + axis * b.row_stride[0] + query * b.row_stride[2];
}

const QueryRows& line_of(const Block& b, int64_t axis, int64_t query) {
  return b.lines[axis * (b.row_stride[0] / b.keys) + query];
}

/// The elements of a line in the compute type, in memory order.
template <typename T>
void load_line(const T* in, int64_t keys, Compute<T>* line) {
  core::for_blocks(keys, [&](int64_t first, auto count) POSEMBED_INLINE_LAMBDA {
    core::load_elements(in + first, count, line + first);
  });
}

template <typename T>
void store_line(const Compute<T>* line, int64_t keys, T* out) {
  core::for_blocks(keys, [&](int64_t first, auto count) POSEMBED_INLINE_LAMBDA {
    if constexpr (std::is_same_v<T, core::BFloat16>) {
      for (int64_t i = 0; i < count; ++i) core::store(line[first + i], out + first + i);
    } else {
      core::store_block(core::load_values<T>(line + first), out + first, count);
    }
  });
}

/// Calls visit(run, first key, rows of the run, products of row 0 of its first key) for the runs of
/// all axes. Products of keys are `stride` apart.
template <typename C, typename Visit>
void for_runs(const Block& b, int64_t query, int64_t stride, const Visit& visit) {
  C* const products = static_cast<C*>(b.products) + (b.by_key ? 0 : query * b.row_count);
  for (int64_t axis = 0; axis < b.axes; ++axis) {
    const int32_t* rows = rows_of(b, axis, query);
    if (b.lines == nullptr) {
      visit(Run{static_cast<int32_t>(b.keys), 0, any_step}, 0, rows, products);
      continue;
    }
    int64_t key = 0;
    for (const Run& run : line_of(b, axis, query).runs) {
      visit(run, key, rows + key, products + key * stride);
      key += run.keys;
    }
  }
}

template <typename T>
void gather_line(const Block& b, int64_t query, Compute<T>* POSEMBED_RESTRICT sums) {
  using C = Compute<T>;
  const auto scale = static_cast<C>(b.scale);
  const int64_t stride = b.by_key ? b.row_count : 0;
  if (b.scores == nullptr) {
    std::fill_n(sums, b.keys, C(0));
  } else {
    load_line(static_cast<const T*>(b.scores) + query * b.score_stride[2], b.keys, sums);
  }
  for_runs<C>(b, query, stride, [&](const Run& run, int64_t key, const int32_t* rows, C* products) {
    C* POSEMBED_RESTRICT sum = sums + key;
    const C* POSEMBED_RESTRICT product = products + std::max<int64_t>(run.row - b.first_row, 0);
    if (run.step == any_step) {
      for (int64_t i = 0; i < run.keys; ++i) {
        // Read for every key, so that the loop has no branch.
        const int64_t row = std::max<int64_t>(rows[i] - b.first_row, 0);
        const C total = sum[i] + (rows[i] < 0 ? C(0) : scale * products[i * stride + row]);
        sum[i] = rows[i] == hidden_row ? -static_cast<C>(INFINITY) : total;
      }
    } else if (run.row < 0) {
      if (run.row == hidden_row) std::fill_n(sum, run.keys, -static_cast<C>(INFINITY));
    } else if (run.step == 0) {
      const C logit = scale * *product;
      for (int64_t i = 0; i < run.keys; ++i) sum[i] += logit;
    } else if (run.step == 1) {
      for (int64_t i = 0; i < run.keys; ++i) sum[i] += scale * product[i];
    } else {
      for (int64_t i = 0; i < run.keys; ++i) sum[i] += scale * product[-i];
    }
  });
  store_line(sums, b.keys, static_cast<T*>(b.out) + query * b.out_stride[2]);
}

/// The sum of an array, in an order that its length gives.
template <typename C>
POSEMBED_INLINE C sum_of(const C* values, int64_t count) {
  constexpr int64_t lanes = 16;
  C lane[lanes] = {};
  for (int64_t i = 0; i + lanes <= count; i += lanes) {
    for (int64_t k = 0; k < lanes; ++k) lane[k] += values[i + k];
  }
  for (int64_t k = 0; k < count % lanes; ++k) lane[k] += values[count / lanes * lanes + k];
  for (int64_t half = lanes / 2; half > 0; half /= 2) {
    for (int64_t k = 0; k < half; ++k) lane[k] += lane[k + half];
  }
  return lane[0];
}

template <typename T>
void scatter_line(const Block& b, int64_t query, Compute<T>* POSEMBED_RESTRICT values) {
  using C = Compute<T>;
  const auto scale = static_cast<C>(b.scale);
  const int64_t stride = b.by_key ? b.row_count : 0;
  load_line(static_cast<const T*>(b.scores) + query * b.score_stride[2], b.keys, values);
  for (int64_t i = 0; i < b.keys; ++i) values[i] *= scale;
  for_runs<C>(b, query, stride, [&](const Run& run, int64_t key, const int32_t* rows, C* products) {
    const C* POSEMBED_RESTRICT value = values + key;
    C* POSEMBED_RESTRICT sum = products + std::max<int64_t>(run.row - b.first_row, 0);
    if (run.step == any_step) {
      for (int64_t i = 0; i < run.keys; ++i) {
        if (rows[i] >= 0) products[i * stride + rows[i] - b.first_row] += value[i];
      }
    } else if (run.row < 0) {
      return;
    } else if (run.step == 0) {
      *sum += sum_of(value, run.keys);
    } else if (run.step == 1) {
      for (int64_t i = 0; i < run.keys; ++i) sum[i] += value[i];
    } else {
      for (int64_t i = 0; i < run.keys; ++i) sum[-i] += value[i];
    }
  });
}

}  // namespace

void find_runs(const int32_t* rows, int64_t keys, Run* runs, int64_t& count, QueryRows& line) {
  find_bounds(rows, keys, line);
  count = 0;
  for (int64_t key = 0; key < keys;) {
    Run run = run_of(rows + key, keys - key);
    // The last key of a short run may begin the next one.
    if (run.keys < shortest_run) run = {std::max(run.keys - 1, 1), 0, any_step};
    key += run.keys;
    if (run.step == any_step && count > 0 && runs[count - 1].step == any_step) {
      runs[count - 1].keys += run.keys;
    } else {
      runs[count++] = run;
    }
  }
}

void narrow_rows(Block& block) {
  int32_t low = std::numeric_limits<int32_t>::max(), high = -1;
  QueryRows own;
  for (int64_t axis = 0; axis < block.axes; ++axis) {
    for (int64_t query = 0; query < block.queries; ++query) {
      if (block.lines == nullptr) find_bounds(rows_of(block, axis, query), block.keys, own);
      const QueryRows& line = block.lines == nullptr ? own : line_of(block, axis, query);
      low = std::min(low, line.low);
      high = std::max(high, line.high);
    }
  }
  block.first_row = low > high ? 0 : low;
  block.row_count = low > high ? 1 : high - low + 1;
}

void gather(const Block& block) {
  core::visit_scalar(block.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    std::vector<Compute<T>> line(static_cast<size_t>(core::round_up_to_blocks(block.keys)));
    for (int64_t query = 0; query < block.queries; ++query) {
      gather_line<T>(block, query, line.data());
    }
  });
}

void scatter(const Block& block) {
  core::visit_scalar(block.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    std::vector<Compute<T>> line(static_cast<size_t>(core::round_up_to_blocks(block.keys)));
    for (int64_t query = 0; query < block.queries; ++query) {
      scatter_line<T>(block, query, line.data());
    }
  });
}

}  // namespace posembed::relative_logits::POSEMBED_ISA
