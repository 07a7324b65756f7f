// Sums a token's row in a buffer in the L1 cache and applies norm and dropout there, so that each
// table row is read once and the output is written once. Sums have the same bits on every
// instruction set.
#include "input/input_cpu.h"

#include <cmath>

#include "core/block32.h"
#include "core/block32_sum.h"
#include "core/stream.h"
#include "input/input.h"

namespace posembed::input::POSEMBED_ISA {

// --------------------------------------------------------------------------------------- add range
// Forward without a norm: adds rows in registers, four tokens at a time, because reading several
// pages in parallel is faster than one after another.

/// `plain`: see sum_at.
template <typename T, bool plain, bool streaming>
class RowAdder {
 public:
  explicit RowAdder(int64_t dim) : dim_(dim) {}

  void add(const RowPointers<T>& rows, T* out) {
    rows_[count_] = rows;
    out_[count_++] = out;
    if (count_ == side_by_side) add_all();
  }

  void flush() {
    for (int64_t k = 0; k < count_; ++k) {
      core::for_blocks(dim_, [&](int64_t i, auto count) { add_block(k, i, count); });
    }
    count_ = 0;
  }

 private:
  static constexpr int64_t side_by_side = 4;
  /// Elements of a row to process before switching to the next row: 256 bytes.
  static constexpr int64_t step = 256 / sizeof(T);

  template <typename Count>
  void add_block(int64_t k, int64_t i, Count count) const {
    core::store_block<streaming>(sum_at<plain>(rows_[k], i, count), out_[k] + i, count);
  }

  void add_all() {
    const int64_t whole = dim_ - dim_ % step;
    for (int64_t first = 0; first < whole; first += step) {
#pragma GCC unroll 1
      for (int64_t k = 0; k < side_by_side; ++k) {
        for (int64_t i = 0; i < step; i += core::block_size)
          add_block(k, first + i, core::WholeBlock{});
      }
    }
#pragma GCC unroll 1
    for (int64_t k = 0; k < side_by_side; ++k) {
      core::for_blocks(dim_ - whole,
                       [&](int64_t i, auto count) { add_block(k, whole + i, count); });
    }
    count_ = 0;
  }

  int64_t dim_, count_ = 0;
  RowPointers<T> rows_[side_by_side];
  T* out_[side_by_side];
};

template <typename T, bool plain, bool streaming>
void add_tokens(const ForwardArguments& f, int64_t begin, int64_t end) {
  const Arguments& a = f.input;
  RowAdder<T, plain, streaming> adder(a.embedding_dim);
  TokenIterator<T> tokens(a, begin, end);
  for (int64_t number = begin; number < end; ++number, tokens.advance()) {
    // Only one row of sinusoids is kept: the next position overwrites it.
    if (tokens.computes_sinusoid()) adder.flush();
    if (streaming) tokens.expect(static_cast<const T*>(f.out));
    adder.add(tokens.rows(), static_cast<T*>(f.out) + row_of(a, tokens.token()) * a.embedding_dim);
  }
  adder.flush();
}

/// The same with dropout: one token at a time, because drawing random numbers takes most of the
/// time.
template <typename T, bool streaming>
void drop_tokens(const ForwardArguments& f, int64_t begin, int64_t end) {
  const Arguments& a = f.input;
  const int64_t dim = a.embedding_dim;
  TokenIterator<T> tokens(a, begin, end);
  DropFactors<T> drop(a.dropout, a.seed, a.first_element, dim);
  for (int64_t number = begin; number < end; ++number, tokens.advance()) {
    const int64_t row = row_of(a, tokens.token());
    const RowPointers<T> rows = tokens.rows();
    const Compute<T>* factors = drop.at(row * dim, dim);
    T* out = static_cast<T*>(f.out) + row * dim;
    core::for_blocks(dim, [&](int64_t i, auto count) {
      const Block32<T> sum = sum_at<false>(rows, i, count);
      core::store_block<streaming>(sum * core::load_values<T>(factors + i), out + i, count);
    });
  }
}

// -------------------------------------------------------------------------------------- norm range
// Forward with a norm. Sums one token's row in a buffer in the L1 cache while it normalises and
// writes the row of an earlier token, so that additions do not wait for square roots or memory.

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

// ----------------------------------------------------------------------------------- backward part
// The backward pass of one part of the tokens. Gathers and sums each token's rows again, propagates
// its gradient through dropout and norm, and accumulates gradients that sum over tokens. Processes
// four tokens of a position together, so that these sums are loaded and stored once for all four.

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

namespace {

// ------------------------------------------------------------------------------------------ kernel

using core::for_blocks;
using core::load_block;
using core::load_values;
using core::store_block;

template <typename T>
bool is_streamed(const Arguments& a, const void* out) {
  return core::streams_rows<T>(out, a.batch * a.seq, a.embedding_dim);
}

/// Whether plain sums have separate loops: only where their speed justifies their code size.
template <typename T>
constexpr bool has_plain = core::wide && !std::is_same_v<T, double>;

// ---- forward ----

template <typename T, bool plain, bool streaming>
void forward_tokens(const ForwardArguments& f, int64_t begin, int64_t end) {
  if (f.input.norm != Norm::none) {
    NormRange<T, plain, streaming>(f, begin, end).run();
  } else if (f.input.seed != nullptr) {
    drop_tokens<T, streaming>(f, begin, end);
  } else {
    add_tokens<T, plain, streaming>(f, begin, end);
  }
  if (streaming) core::stream_fence();
}

template <typename T, bool plain>
void forward_range(const ForwardArguments& f, int64_t begin, int64_t end) {
  if (is_streamed<T>(f.input, f.out)) {
    forward_tokens<T, plain, true>(f, begin, end);
  } else {
    forward_tokens<T, plain, false>(f, begin, end);
  }
}

// ---- backward ----

template <typename T, bool plain>
void backward_parts(const BackwardArguments& b, int64_t begin, int64_t end) {
  const bool streamed =
      is_streamed<T>(b.input, b.sum_gradient) && core::is_aligned_to_vector(b.position_gradient);
  for (int64_t number = begin; number < end; ++number) {
    if (streamed) {
      BackwardPart<T, plain, true>(b, number).run();
    } else {
      BackwardPart<T, plain, false>(b, number).run();
    }
  }
  if (streamed) core::stream_fence();
}

template <typename T>
void add_sums(const BackwardArguments& b, int64_t begin, int64_t end) {
  const int64_t columns = partial_columns(b.input.embedding_dim), stride = sums_of(b) * columns;
  for (int64_t number = begin; number < end; ++number) {
    T* out = sum_target<T>(b, number);
    if (out == nullptr) continue;
    const auto* from = static_cast<const Compute<T>*>(b.partial) + number * columns;
    for_blocks(b.input.embedding_dim, [&](int64_t i, auto count) {
      Block32<T> total{};
      for (int64_t part = 0; part < b.parts; ++part) {
        total = total + load_values<T>(from + part * stride + i);
      }
      store_block(total, out + i, count);
    });
  }
}

// ---- dropout alone ----

// Long inputs are processed in pieces of this size, as rows are.
constexpr int64_t piece = 1024;

template <typename T>
void drop_range(const DropoutArguments& d, int64_t begin, int64_t end) {
  DropFactors<T> factors(d.probability, d.seed, d.first, piece);
  for (int64_t first = begin; first < end; first += piece) {
    const int64_t columns = end - first < piece ? end - first : piece;
    const T* x = static_cast<const T*>(d.x) + first;
    const Compute<T>* factor = factors.at(first, columns);
    T* out = static_cast<T*>(d.out) + first;
    for_blocks(columns, [&](int64_t i, auto count) {
      store_block(load_block(x + i, count) * load_values<T>(factor + i), out + i, count);
    });
  }
}

}  // namespace

void forward(const ForwardArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.input.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto run =
        is_plain(arguments.input) ? forward_range<T, has_plain<T>> : forward_range<T, false>;
    run(arguments, begin, end);
  });
}

void backward(const BackwardArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.input.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto run =
        is_plain(arguments.input) ? backward_parts<T, has_plain<T>> : backward_parts<T, false>;
    run(arguments, begin, end);
  });
}

void add_parts(const BackwardArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.input.scalar, [&](auto tag) {
    add_sums<typename decltype(tag)::type>(arguments, begin, end);
  });
}

void drop(const DropoutArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    drop_range<typename decltype(tag)::type>(arguments, begin, end);
  });
}

}  // namespace posembed::input::POSEMBED_ISA
