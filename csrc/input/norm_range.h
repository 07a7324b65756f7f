// Forward with a norm. Sums one token's row in a buffer in the L1 cache while it normalises and
// writes the row of an earlier token, so that additions do not wait for square roots or memory.
// Part of kernel_cpu.cpp.
#pragma once

#include <cmath>

#include "core/block32_sum.h"
#include "input/drop_factors.h"
#include "input/token_rows.h"

namespace posembed::input::POSEMBED_ISA {

/// Per-lane sums over a row.
template <typename T>
struct Sums {
  Block32<T> total{}, squares{};
};

/// A summed row; normalised, it is sum * rstd + shift.
template <typename T>
struct SummedRow {
  Compute<T>* sum = nullptr;
  int64_t number = 0;  // in [batch, seq]
  Compute<T> rstd = 1, shift = 0;
};

/// `plain`: see sum_at.
template <typename T, bool plain, bool streaming>
class NormRange {
 public:
  using C = Compute<T>;

  NormRange(const ForwardArguments& f, int64_t begin, int64_t end)
      : f_(f),
        a_(f.input),
        dim_(a_.embedding_dim),
        count_(end - begin),
        memory_(delay + 1, dim_),
        tokens_(a_, begin, end),
        factors_(a_.dropout, a_.seed, a_.first_element, dim_),
        weight_(a_.norm_weight, dim_, 1),
        bias_(a_.norm_bias, dim_, 0) {}

  void run() {
    SummedRow<T> rows[delay + 1];
    for (int64_t i = 0; i < count_ + delay; ++i) {
      SummedRow<T>& now = rows[i % (delay + 1)];
      const SummedRow<T>& before = rows[(i + 1) % (delay + 1)];
      if (i >= count_) {
        if (i >= delay) core::for_blocks(dim_, writer(before));
        continue;
      }
      if (streaming) tokens_.expect(static_cast<const T*>(f_.out));
      now = {memory_.row(i % (delay + 1)), row_of(a_, tokens_.token())};
      const auto add = adder(now.sum);
      const Sums<T> sums = i < delay ? core::fold_blocks(dim_, Sums<T>{}, add, [](int64_t, auto) {})
                                     : core::fold_blocks(dim_, Sums<T>{}, add, writer(before));
      measure(core::sum(sums.total), core::sum(sums.squares), now);
      tokens_.advance();
    }
  }

 private:
  /// A row is written this many rows after it is summed. With 1, writing would wait for mean and
  /// variance.
  static constexpr int64_t delay = 2;

  auto adder(C* sum) {
    return [rows = tokens_.rows(), sum](Sums<T> sums, int64_t i, auto count)
               POSEMBED_INLINE_LAMBDA {
                 const Block32<T> value = sum_at<plain>(rows, i, count);
                 core::store_values(value, sum + i);
                 return Sums<T>{sums.total + value, core::fma(value, value, sums.squares)};
               };
  }

  auto writer(const SummedRow<T>& row) {
    const C* factors = factors_.at(row.number * dim_, dim_);
    return [sum = row.sum, rstd = core::fill<T>(row.rstd), shift = core::fill<T>(row.shift),
            weight = weight_.values(), bias = bias_.values(), factors,
            out = static_cast<T*>(f_.out) + row.number * dim_](int64_t i,
                                                               auto count) POSEMBED_INLINE_LAMBDA {
      const Block32<T> normed = core::fma(core::load_values<T>(sum + i), rstd, shift);
      Block32<T> result =
          core::fma(normed, core::load_values<T>(weight + i), core::load_values<T>(bias + i));
      if (factors != nullptr) result = result * core::load_values<T>(factors + i);
      core::store_block<streaming>(result, out + i, count);
    };
  }

  /// The mean of squares minus the square of the mean is an accurate variance unless the mean is
  /// large compared with the deviation (or its square overflows). In that case values are centred
  /// first.
  void measure(C total, C total_of_squares, SummedRow<T>& row) const {
    const C squares = total_of_squares / static_cast<C>(dim_);
    const C mean = a_.norm == Norm::layer ? total / static_cast<C>(dim_) : C(0);
    C variance = squares - mean * mean;
    const bool small_mean = squares < 5 * variance;
    if (a_.norm == Norm::layer && !small_mean) variance = centre(mean, row.sum);
    row.rstd = C(1) / std::sqrt(variance + static_cast<C>(a_.eps));
    if (small_mean) row.shift = -mean * row.rstd;
    if (f_.rstd != nullptr) static_cast<C*>(f_.rstd)[row.number] = row.rstd;
    if (f_.mean != nullptr) static_cast<C*>(f_.mean)[row.number] = mean;
  }

  /// Subtracts the mean from a row and returns the variance.
  C centre(C mean, C* sum) const {
    Block32<T> squares{};
    core::for_blocks(dim_, [&](int64_t i, auto count) {
      const Block32<T> value = core::keep_first(core::load_values<T>(sum + i) - mean, count);
      core::store_values(value, sum + i);
      squares = core::fma(value, value, squares);
    });
    return core::sum(squares) / static_cast<C>(dim_);
  }

  const ForwardArguments& f_;
  const Arguments& a_;
  int64_t dim_, count_;
  RowMemory<C> memory_;
  TokenIterator<T> tokens_;
  DropFactors<T> factors_;
  ValueRow<T> weight_, bias_;
};

}  // namespace posembed::input::POSEMBED_ISA
