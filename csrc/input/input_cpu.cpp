// Sums a token's row in a buffer in the L1 cache and applies norm and dropout there, so that each
// table row is read once and the output is written once. Sums have the same bits on every
// instruction set.
#include <cmath>
#include <cstdlib>
#include <new>

#include "core/block32.h"
#include "core/block32_sum.h"
#include "core/philox.h"
#include "core/stream.h"
#include "input/input.h"

namespace posembed::input::POSEMBED_ISA {

using core::Block32;
using core::Compute;

/// Memory for rows in the compute type. Does not use std::vector, because the linker could share
/// its members between instruction sets.
template <typename C>
class RowMemory {
 public:
  /// `rows` of at least `columns` elements, rounded up to whole blocks.
  RowMemory(int64_t rows, int64_t columns) : stride_(core::round_up_to_blocks(columns + 1)) {
    const auto bytes = static_cast<size_t>(rows * stride_) * sizeof(C);
    data_ = static_cast<C*>(std::aligned_alloc(64, bytes));
    if (data_ == nullptr) throw std::bad_alloc();
  }
  RowMemory(const RowMemory&) = delete;
  RowMemory& operator=(const RowMemory&) = delete;
  ~RowMemory() { std::free(data_); }

  C* row(int64_t number) const { return data_ + number * stride_; }

 private:
  int64_t stride_;
  C* data_;
};

/// A row of T as values in block order; a constant if there is no row.
template <typename T>
class ValueRow {
 public:
  using C = Compute<T>;

  ValueRow(const void* row, int64_t columns, C otherwise) : memory_(1, columns) {
    core::for_blocks(columns, [&](int64_t i, auto count) {
      const auto values = row == nullptr ? core::fill<T>(otherwise)
                                         : core::load_block(static_cast<const T*>(row) + i, count);
      core::store_values(values, memory_.row(0) + i);
    });
  }

  const C* values() const { return memory_.row(0); }

 private:
  RowMemory<C> memory_;
};

struct Token {
  int64_t batch, seq;
};

/// The token with a number. Tokens are numbered by seq index, then batch, so that consecutive
/// tokens share a position.
POSEMBED_INLINE Token token_at(const Arguments& a, int64_t number) {
  return {number % a.batch, number / a.batch};
}

/// The token after `token`, without token_at's division.
POSEMBED_INLINE Token after(const Arguments& a, const Token& token) {
  if (token.batch + 1 < a.batch) return {token.batch + 1, token.seq};
  return {0, token.seq + 1};
}

/// The token's index in [batch, seq].
POSEMBED_INLINE int64_t row_of(const Arguments& a, const Token& token) {
  return token.batch * a.seq + token.seq;
}

POSEMBED_INLINE int64_t row_index(const Table& table, const Token& token) {
  return row_index(table, token.batch, token.seq);
}

template <typename T>
POSEMBED_INLINE const T* table_row(const Table& table, const Token& token) {
  if (table.data == nullptr) return nullptr;
  const int64_t row = row_index(table, token) + table.first_row;
  return static_cast<const T*>(table.data) + row * table.stride;
}

/// A row of sinusoids in block order.
template <typename T>
class SinusoidRow {
 public:
  using C = Compute<T>;

  explicit SinusoidRow(const sinusoidal::Sinusoid& sinusoid)
      : sinusoid_(sinusoid), memory_(4, sinusoid.pairs == 0 ? 0 : sinusoid.layout.columns) {}

  /// Whether at(position) would overwrite the row that it last returned.
  bool changes(int64_t position) const {
    return sinusoid_.pairs != 0 && !(known_ && position == position_);
  }

  /// The row of `position`; nullptr without a sinusoid.
  const C* at(int64_t position) {
    if (sinusoid_.pairs == 0) return nullptr;
    if (changes(position)) fill(position);
    return memory_.row(0);
  }

 private:
  void fill(int64_t position) {
    const sinusoidal::Layout& layout = sinusoid_.layout;
    C *row = memory_.row(1), *sines = memory_.row(2), *cosines = memory_.row(3);
    const core::Position placed = sinusoidal::placed(sinusoid_, {position, 0, 1.0});
    sinusoidal::fill_waves(placed.whole, sinusoidal::turns_of<T>(sinusoid_), sinusoid_.pairs,
                           static_cast<C>(scale_of(sinusoid_) * placed.scale), sines, cosines);
    const C* first = layout.cos_first ? cosines : sines;
    const C* second = layout.cos_first ? sines : cosines;
    const int64_t columns = core::round_up_to_blocks(layout.columns);
    for (int64_t i = layout.filled; i < columns; ++i) row[i] = 0;
    const int64_t seconds = layout.filled - sinusoid_.pairs;
    const int64_t step = layout.interleaved ? 2 : 1;
    C* other = row + sinusoidal::second_column(layout, 0);
    for (int64_t i = 0; i < sinusoid_.pairs; ++i) row[i * step] = first[i];
    for (int64_t i = 0; i < seconds; ++i) other[i * step] = second[i];
    core::order_values<T>(row, columns, memory_.row(0));
    position_ = position;
    known_ = true;
  }

  const sinusoidal::Sinusoid& sinusoid_;
  RowMemory<C> memory_;
  bool known_ = false;
  int64_t position_ = 0;
};

/// The addresses of the rows of one token.
template <typename T>
struct RowPointers {
  const T* token = nullptr;
  const T* type = nullptr;
  const T* position = nullptr;
  const Compute<T>* sinusoid = nullptr;
  Compute<T> scale = 1;
  const T* soon = nullptr;  // the token row of a later token, to prefetch
};

/// Prefetches a block of a row into the L2 cache.
template <typename T>
POSEMBED_INLINE void prefetch_block(const T* row) {
  constexpr int64_t line = 64 / sizeof(T);
  for (int64_t k = 0; k < core::block_size; k += line) __builtin_prefetch(row + k, 0, 2);
}

/// Whether only an unscaled token row and a position row are summed. This is the most frequent case
/// and has separate loops, which do not test for other rows.
POSEMBED_INLINE bool is_plain(const Arguments& a) {
  return a.scale == 1 && a.type.data == nullptr && a.position.data != nullptr;
}

/// The sum of a token's rows from column i on, in BERT's order. `plain`: is_plain(arguments).
template <bool plain, typename T, typename Count>
POSEMBED_INLINE Block32<T> sum_at(const RowPointers<T>& rows, int64_t i, Count count) {
  prefetch_block(rows.soon + i);
  Block32<T> sum = core::load_block(rows.token + i, count);
  if constexpr (plain) return sum + core::load_block(rows.position + i, count);
  if (rows.scale != 1) sum = sum * rows.scale;
  if (rows.type != nullptr) sum = sum + core::load_block(rows.type + i, count);
  if (rows.position != nullptr) sum = sum + core::load_block(rows.position + i, count);
  if (rows.sinusoid != nullptr) sum = sum + core::load_values<T>(rows.sinusoid + i);
  return sum;
}

/// Iterates over tokens and finds their rows.
template <typename T>
class TokenIterator {
 public:
  /// Tokens [begin, end).
  TokenIterator(const Arguments& a, int64_t begin, int64_t end)
      : a_(a), left_(end - begin - distance), sinusoid_(a.sinusoid) {
    if (begin >= end) return;
    token_ = token_at(a, begin);
    soon_ = left_ > 0 ? token_at(a, begin + distance) : token_;
  }

  const Token& token() const { return token_; }

  /// The later token whose rows are prefetched.
  const Token& soon() const { return soon_; }

  /// Prefetches the pages of that token's row of `out` [batch, seq, embedding_dim].
  void expect(const T* out) const {
    const int64_t dim = a_.embedding_dim;
    core::expect_stream(out + row_of(a_, soon_) * dim, dim * static_cast<int64_t>(sizeof(T)));
  }

  /// Whether rows() computes a new row of sinusoids.
  bool computes_sinusoid() const { return sinusoid_.changes(row_index(a_.position, token_)); }

  /// The rows of the current token.
  RowPointers<T> rows() {
    return {table_row<T>(a_.token, token_),    table_row<T>(a_.type, token_),
            table_row<T>(a_.position, token_), sinusoid_.at(row_index(a_.position, token_)),
            static_cast<Compute<T>>(a_.scale), table_row<T>(a_.token, soon_)};
  }

  void advance() {
    token_ = after(a_, token_);
    if (--left_ > 0) soon_ = after(a_, soon_);
  }

 private:
  /// How many tokens ahead to prefetch, so that a row arrives from memory while earlier rows are
  /// processed.
  static constexpr int64_t distance = 8;

  const Arguments& a_;
  int64_t left_;  // tokens until soon_ is the last
  Token token_{}, soon_{};
  SinusoidRow<T> sinusoid_;
};

// ------------------------------------------------------------------------------------ drop factors
// Dropout's factors for a row. Each depends only on the seed and the element's index.

template <typename T>
class DropFactors {
 public:
  using C = Compute<T>;

  /// For rows of up to `columns` elements; without a seed there are no factors. `origin`: the index
  /// of element 0 in the mask.
  DropFactors(double probability, const int64_t* seed, int64_t origin, int64_t columns)
      : drops_(seed != nullptr),
        origin_(static_cast<uint64_t>(origin)),
        dropout_(core::make_dropout(probability, drops_ ? static_cast<uint64_t>(*seed) : 0)),
        words_(1, drops_ ? columns + 8 : 0),
        factors_(2, drops_ ? columns : 0) {}

  /// The factors of `columns` elements from `element` on, in block order; nullptr: all are 1.
  const C* at(int64_t element, int64_t columns) {
    if (!drops_) return nullptr;
    const uint64_t first = origin_ + static_cast<uint64_t>(element);
    draw(first, columns);
    const uint32_t* word = words_.row(0) + first % 4;
    C* factor = factors_.row(0);
    const auto scale = static_cast<C>(dropout_.scale);
    for (int64_t i = 0; i < columns; ++i) factor[i] = word[i] < dropout_.threshold ? C(0) : scale;
    const int64_t whole = core::round_up_to_blocks(columns);
    for (int64_t i = columns; i < whole; ++i) factor[i] = 0;
    core::order_values<T>(factor, whole, factors_.row(1));
    return factors_.row(1);
  }

 private:
  /// Philox draws four words at once, so up to three extra at either end.
  void draw(uint64_t first, int64_t columns) {
    const uint64_t counter = first / 4;
    const uint64_t calls = (first + static_cast<uint64_t>(columns) + 3) / 4 - counter;
    uint32_t* word = words_.row(0);
    for (uint64_t i = 0; i < calls; ++i, word += 4) {
      const core::Random4 random = core::philox(dropout_.seed, counter + i);
      for (int k = 0; k < 4; ++k) word[k] = random.words[k];
    }
  }

  bool drops_;
  uint64_t origin_;
  core::Dropout dropout_;
  RowMemory<uint32_t> words_;
  RowMemory<C> factors_;
};

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

template <typename T>
bool is_streamed(const Arguments& a, const void* out) {
  return core::streams_rows<T>(out, a.batch * a.seq, a.embedding_dim);
}

/// Calls function(Tag<T>, plain). Plain sums have separate loops only where their speed justifies
/// their code size.
template <typename Function>
void visit(const Arguments& a, const Function& function) {
  core::visit_scalar(a.scalar, [&](auto tag) {
    constexpr bool has_plain = core::wide && !std::is_same_v<typename decltype(tag)::type, double>;
    if (has_plain && is_plain(a)) return function(tag, std::bool_constant<has_plain>());
    function(tag, std::false_type());
  });
}

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
    core::for_blocks(b.input.embedding_dim, [&](int64_t i, auto count) {
      Block32<T> total{};
      for (int64_t part = 0; part < b.parts; ++part) {
        total = total + core::load_values<T>(from + part * stride + i);
      }
      core::store_block(total, out + i, count);
    });
  }
}

/// Dropout alone processes long inputs in pieces of this size.
constexpr int64_t piece = 1024;

template <typename T>
void drop_range(const DropoutArguments& d, int64_t begin, int64_t end) {
  DropFactors<T> factors(d.probability, d.seed, d.first, piece);
  for (int64_t first = begin; first < end; first += piece) {
    const int64_t columns = end - first < piece ? end - first : piece;
    const T* x = static_cast<const T*>(d.x) + first;
    const Compute<T>* factor = factors.at(first, columns);
    T* out = static_cast<T*>(d.out) + first;
    core::for_blocks(columns, [&](int64_t i, auto count) {
      const Block32<T> value = core::load_block(x + i, count);
      core::store_block(value * core::load_values<T>(factor + i), out + i, count);
    });
  }
}

}  // namespace

void forward(const ForwardArguments& arguments, int64_t begin, int64_t end) {
  visit(arguments.input, [&](auto tag, auto plain) {
    using T = typename decltype(tag)::type;
    if (is_streamed<T>(arguments.input, arguments.out)) {
      forward_tokens<T, plain, true>(arguments, begin, end);
    } else {
      forward_tokens<T, plain, false>(arguments, begin, end);
    }
  });
}

void backward(const BackwardArguments& arguments, int64_t begin, int64_t end) {
  visit(arguments.input, [&](auto tag, auto plain) {
    backward_parts<typename decltype(tag)::type, plain>(arguments, begin, end);
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
