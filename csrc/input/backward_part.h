// The backward pass of one part of the tokens. Gathers and sums each token's rows again, propagates
// its gradient through dropout and norm, and accumulates gradients that sum over tokens. Processes
// four tokens of a position together, so that these sums are loaded and stored once for all four.
// Part of kernel_cpu.cpp.
#pragma once

#include "core/block32_sum.h"
#include "input/drop_factors.h"
#include "input/token_rows.h"

namespace posembed::input::POSEMBED_ISA {

/// The inputs of a token's gradient, and where it is written.
template <typename T>
struct GradientRow {
  using C = Compute<T>;

  RowPointers<T> rows;
  const T* gradient;  // the output's gradient
  const T* soon;      // that of a later token, to prefetch
  T* out;             // nullptr: only the sums are needed
  C* type;            // the sum of its type; nullptr: not needed
  C mean, rstd;
  C* normalised;  // memory for the normalised row
};

/// Per-lane sums over a row: of the weighted gradient times the normalised row, and of the weighted
/// gradient.
template <typename T, int group>
struct GradientSums {
  Block32<T> projection[group]{}, total[group]{};
};

/// `plain`: see sum_at.
template <typename T, bool plain, bool streaming>
class BackwardPart {
 public:
  using C = Compute<T>;

  BackwardPart(const BackwardArguments& b, int64_t number)
      : b_(b),
        a_(b.input),
        dim_(a_.embedding_dim),
        columns_(partial_columns(dim_)),
        count_(last(number) - last(number - 1)),
        grouped_(together > 1 && a_.norm != Norm::none && a_.seed == nullptr && shares_waves(a_)),
        memory_(together + 3, dim_),
        tokens_(a_, last(number - 1), last(number)),
        factors_(a_.dropout, a_.seed, a_.first_element, dim_),
        weight_(a_.norm_weight, dim_, 1),
        partial_(static_cast<C*>(b.partial)),
        position_(memory_.row(together)),
        weight_sum_(memory_.row(together + 1)),
        bias_sum_(memory_.row(together + 2)) {
    clear(position_);
    clear(weight_sum_);
    clear(bias_sum_);
    if (partial_ == nullptr) return;
    partial_ += number * sums_of(b) * columns_;
    for (int64_t i = 0; i < sums_of(b) * columns_; ++i) partial_[i] = 0;
    weight_sum_ = partial_;
    bias_sum_ = partial_ + columns_;
  }

  void run() {
    for (int64_t left = count_; left > 0;) {
      const Token token = tokens_.token();
      if (token.batch == 0) clear(position_);
      const bool group = grouped_ && left >= together && token.batch + together <= a_.batch;
      if (group) {
        through_norm<together>(nullptr);
      } else {
        through_token();
      }
      const int64_t done = group ? together : 1;
      left -= done;
      const bool last_of_seq = token.batch + done == a_.batch;
      if (b_.position_gradient != nullptr && last_of_seq) store_position(token.seq);
    }
  }

 private:
  /// The number of tokens that are processed together.
  static constexpr int together = core::wide && !std::is_same_v<T, double> ? 4 : 1;

  /// Whether the tokens of a seq index share a row of sinusoids, if any: only one row is kept.
  static bool shares_waves(const Arguments& a) {
    return a.sinusoid.pairs == 0 || a.position.index_stride[0] == 0;
  }

  /// The end of a part. For the position gradient, all tokens of a seq index belong to one part.
  int64_t last(int64_t number) const {
    const int64_t unit = b_.position_gradient == nullptr ? 1 : a_.batch;
    return (number + 1) * (a_.batch * a_.seq / unit) / b_.parts * unit;
  }

  void clear(C* row) const {
    for (int64_t i = 0; i < columns_; ++i) row[i] = 0;
  }

  /// Uses non-temporal stores, as for the rows: ordinary stores read memory first and would delay
  /// them.
  void store_position(int64_t seq) const {
    T* out = static_cast<T*>(b_.position_gradient) + seq * dim_;
    core::for_blocks(dim_, [&](int64_t i, auto count) {
      core::store_block<streaming>(core::load_values<T>(position_ + i), out + i, count);
    });
  }

  /// The destination of the gradient of a token's sum; nullptr: not written.
  T* target(const Token& token) const {
    const int64_t row = row_of(a_, token);
    if (b_.sum_rows != nullptr) return static_cast<T*>(b_.sum_rows[row]);
    return b_.sum_gradient == nullptr ? nullptr : static_cast<T*>(b_.sum_gradient) + row * dim_;
  }

  /// Takes the current token as number `k` of its group and advances to the next token.
  GradientRow<T> take_row(int k) {
    const Token token = tokens_.token();
    const int64_t row = row_of(a_, token);
    const T* gradient = static_cast<const T*>(b_.gradient);
    GradientRow<T> result{tokens_.rows(),
                          gradient + row * dim_,
                          gradient + row_of(a_, tokens_.soon()) * dim_,
                          nullptr,
                          nullptr,
                          0,
                          1,
                          memory_.row(k)};
    result.out = target(token);
    if (streaming) core::expect_stream(target(tokens_.soon()), dim_ * int64_t{sizeof(T)});
    if (b_.type_gradient != nullptr) {
      result.type = partial_ + (2 + row_index(a_.type, token)) * columns_;
    }
    if (b_.mean != nullptr) result.mean = static_cast<const C*>(b_.mean)[row];
    if (b_.rstd != nullptr) result.rstd = static_cast<const C*>(b_.rstd)[row];
    tokens_.advance();
    return result;
  }

  void through_token() {
    const int64_t row = row_of(a_, tokens_.token());
    const C* factors = factors_.at(row * dim_, dim_);
    if (a_.norm == Norm::none) {
      sum_row(take_row(0), factors);
    } else {
      through_norm<1>(factors);
    }
  }

  template <typename Count>
  POSEMBED_INLINE Block32<T> gradient_at(const GradientRow<T>& row, const C* factors, int64_t i,
                                         Count count) {
    const Block32<T> gradient = core::load_block(row.gradient + i, count);
    return factors == nullptr ? gradient : gradient * core::load_values<T>(factors + i);
  }

  /// Adds a block of a token's gradient to the sum of its type and writes it.
  template <typename Count>
  POSEMBED_INLINE void write(const GradientRow<T>& row, Block32<T> value, int64_t i, Count count) {
    if (row.type != nullptr) {
      core::store_values(core::load_values<T>(row.type + i) + value, row.type + i);
    }
    if (row.out != nullptr) core::store_block<streaming>(core::as_sum(value), row.out + i, count);
  }

  /// Without a norm, the gradient is only summed and copied.
  void sum_row(const GradientRow<T>& row, const C* factors) const {
    core::for_blocks(dim_, [&](int64_t i, auto count) {
      prefetch_block(row.soon + i);
      const Block32<T> value = gradient_at(row, factors, i, count);
      core::store_values(core::load_values<T>(position_ + i) + value, position_ + i);
      write(row, value, i, count);
    });
  }

  /// The gradient of the norm's input for the next `group` tokens.
  template <int group>
  void through_norm(const C* factors) {
    GradientRow<T> rows[group];
    for (int k = 0; k < group; ++k) rows[k] = take_row(k);
    const GradientSums<T, group> sums = sum_gradients<group>(rows, factors);
    C slope[group], offset[group];
    for (int k = 0; k < group; ++k) {
      const C factor = -rows[k].rstd / static_cast<C>(dim_);
      slope[k] = core::sum(sums.projection[k]) * factor;
      offset[k] = a_.norm == Norm::layer ? core::sum(sums.total[k]) * factor : C(0);
    }
    core::for_blocks(dim_, [&](int64_t i, auto count) POSEMBED_INLINE_LAMBDA {
      const Block32<T> weight = core::load_values<T>(weight_.values() + i);
      Block32<T> position = core::load_values<T>(position_ + i);
#pragma GCC unroll 4
      for (int k = 0; k < group; ++k) {
        const Block32<T> g = gradient_at(rows[k], factors, i, count) * weight;
        const Block32<T> straight =
            core::fma(g, core::fill<T>(rows[k].rstd), core::fill<T>(offset[k]));
        const Block32<T> value = core::fma(core::load_values<T>(rows[k].normalised + i),
                                           core::fill<T>(slope[k]), straight);
        position = position + value;
        write(rows[k], value, i, count);
      }
      core::store_values(position, position_ + i);
    });
  }

  /// Computes each normalised row and its sums, and accumulates the gradients of the norm's
  /// parameters.
  template <int group>
  GradientSums<T, group> sum_gradients(const GradientRow<T> (&rows)[group],
                                       const C* factors) const {
    const auto add = [&](GradientSums<T, group> sums, int64_t i,
                         auto count) POSEMBED_INLINE_LAMBDA {
      const Block32<T> weight = core::load_values<T>(weight_.values() + i);
      Block32<T> weight_sum = core::load_values<T>(weight_sum_ + i);
      Block32<T> bias_sum = core::load_values<T>(bias_sum_ + i);
#pragma GCC unroll 4
      for (int k = 0; k < group; ++k) {
        const Block32<T> x = (sum_at<plain>(rows[k].rows, i, count) - rows[k].mean) * rows[k].rstd;
        prefetch_block(rows[k].soon + i);
        Block32<T> g = gradient_at(rows[k], factors, i, count);
        weight_sum = core::fma(g, x, weight_sum);
        bias_sum = bias_sum + g;
        g = g * weight;
        core::store_values(x, rows[k].normalised + i);
        sums.projection[k] = core::fma(g, x, sums.projection[k]);
        sums.total[k] = sums.total[k] + g;
      }
      core::store_values(weight_sum, weight_sum_ + i);
      core::store_values(bias_sum, bias_sum_ + i);
      return sums;
    };
    return core::fold_blocks(dim_, GradientSums<T, group>{}, add, [](int64_t, auto) {});
  }

  const BackwardArguments& b_;
  const Arguments& a_;
  int64_t dim_, columns_, count_;
  bool grouped_;
  RowMemory<C> memory_;
  TokenIterator<T> tokens_;
  DropFactors<T> factors_;
  ValueRow<T> weight_;
  C* partial_;
  C *position_, *weight_sum_, *bias_sum_;  // scratch memory if not needed
};

}  // namespace posembed::input::POSEMBED_ISA
