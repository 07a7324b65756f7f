// A token's row is summed into memory that stays in the first-level cache, where norm and dropout
// work on it; memory sees each table row once and the output once. Sums give the same bits on
// every instruction set.
#include <cmath>

#include "core/run.h"
#include "core/stream.h"
#include "input/drop_factors.h"
#include "input/kernel.h"
#include "input/token_rows.h"

namespace posembed::input::POSEMBED_ISA {
namespace {

using core::for_runs;
using core::keep;
using core::load_run;
using core::load_values;
using core::store_run;
using core::store_values;

template <typename C>
struct Statistics {
  C mean = 0;
  C rstd = 1;
};

/// Sums a token's rows into `sum` and measures them for the norm.
template <typename T, typename C = Compute<T>>
Statistics<C> sum_rows(const Arguments& a, const Rows<T>& rows, C* POSEMBED_RESTRICT sum) {
  const int64_t dim = a.embedding_dim;
  const Run<T> total = core::add_runs<T>(dim, [&](int64_t i, auto count) {
    const Run<T> value = sum_at(rows, i, count);
    store_values(value, sum + i);
    return value;
  });
  Statistics<C> result;
  if (a.norm == Norm::layer) result.mean = core::sum(total) / static_cast<C>(dim);
  const Run<T> squares = core::add_runs<T>(dim, [&](int64_t i, auto count) {
    const Run<T> value = keep(load_values<T>(sum + i) - result.mean, count);
    return value * value;
  });
  const C variance = core::sum(squares) / static_cast<C>(dim);
  result.rstd = C(1) / std::sqrt(variance + static_cast<C>(a.eps));
  return result;
}

/// What happens to a row between its norm and memory.
template <typename T>
struct Finish {
  const Compute<T>* weight;
  const Compute<T>* bias;
  const Compute<T>* factors;
};

template <typename T>
POSEMBED_INLINE Run<T> apply(const Finish<T>& finish, Run<T> row, int64_t i) {
  if (finish.weight != nullptr) row = row * load_values<T>(finish.weight + i);
  if (finish.bias != nullptr) row = row + load_values<T>(finish.bias + i);
  if (finish.factors != nullptr) row = row * load_values<T>(finish.factors + i);
  return row;
}

/// Writes value(i, count) of each run.
template <typename T, typename Value>
POSEMBED_INLINE void write_row(int64_t dim, bool streamed, T* out, const Value& value) {
  if (streamed) {
    for_runs(dim, [&](int64_t i, auto count) { store_run<true>(value(i, count), out + i, count); });
  } else {
    for_runs(dim, [&](int64_t i, auto count) { store_run(value(i, count), out + i, count); });
  }
}

/// Whether rows shall go past the caches: where they would not stay in them, if rows are aligned.
template <typename T>
bool is_streamed(const Arguments& a, const void* out) {
  const int64_t row_bytes = a.embedding_dim * int64_t{sizeof(T)};
  return a.batch * a.seq * row_bytes >= core::stream_bytes && row_bytes % 64 == 0 &&
         core::is_aligned_to_vector(out);
}

// ---- forward ----

template <typename T>
void forward_range(const ForwardArguments& f, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const Arguments& a = f.input;
  const int64_t dim = a.embedding_dim;
  const bool streamed = is_streamed<T>(a, f.out);
  const RowMemory<C> memory(1, dim);
  C* sum = memory.row(0);
  TokenRows<T> tokens(a, begin, end);
  DropFactors<T> factors(a.dropout, a.seed, dim);
  const ValueRow<T> weight(a.norm_weight, dim), bias(a.norm_bias, dim);
  Finish<T> finish{weight.values(), bias.values(), nullptr};
  for (int64_t number = begin; number < end; ++number, tokens.advance()) {
    const int64_t row = row_of(a, tokens.token());
    const Rows<T> rows = tokens.rows();
    finish.factors = factors.at(static_cast<uint64_t>(row * dim), dim);
    T* out = static_cast<T*>(f.out) + row * dim;
    if (a.norm == Norm::none) {
      write_row(dim, streamed, out,
                [&](int64_t i, auto count) { return apply(finish, sum_at(rows, i, count), i); });
      continue;
    }
    const Statistics<C> found = sum_rows(a, rows, sum);
    if (f.rstd != nullptr) static_cast<C*>(f.rstd)[row] = found.rstd;
    if (f.mean != nullptr) static_cast<C*>(f.mean)[row] = found.mean;
    write_row(dim, streamed, out, [&](int64_t i, auto) {
      return apply(finish, (load_values<T>(sum + i) - found.mean) * found.rstd, i);
    });
  }
  if (streamed) core::stream_fence();
}

// ---- backward ----

template <typename T>
POSEMBED_INLINE void add_values(Run<T> values, Compute<T>* sum) {
  store_values(load_values<T>(sum) + values, sum);
}

/// One part's share of the backward pass.
template <typename T>
class BackwardPart {
 public:
  using C = Compute<T>;

  BackwardPart(const BackwardArguments& b, int64_t number)
      : b_(b),
        a_(b.input),
        dim_(a_.embedding_dim),
        columns_(partial_columns(dim_)),
        streamed_(is_streamed<T>(a_, b.sum_gradient)),
        memory_(3, dim_),
        tokens_(a_, last(number - 1), last(number)),
        factors_(a_.dropout, a_.seed, dim_),
        weight_(a_.norm_weight, dim_),
        partial_(static_cast<C*>(b.partial)) {
    if (partial_ == nullptr) return;
    partial_ += number * sums_of(b) * columns_;
    for (int64_t i = 0; i < sums_of(b) * columns_; ++i) partial_[i] = 0;
  }

  void run(int64_t number) {
    const int64_t count = last(number) - last(number - 1);
    for (int64_t i = 0; i < count; ++i, tokens_.advance()) {
      const Token token = tokens_.token();
      if (b_.position_gradient != nullptr && token.batch == 0) clear(memory_.row(2));
      through_token(token);
      if (b_.position_gradient != nullptr && token.batch == a_.batch - 1) {
        store_position(token.place);
      }
    }
    if (streamed_) core::stream_fence();
  }

 private:
  /// The end of a part. Where positions are summed, a place's tokens stay together.
  int64_t last(int64_t number) const {
    const int64_t unit = b_.position_gradient == nullptr ? 1 : a_.batch;
    return (number + 1) * (a_.batch * a_.seq / unit) / b_.parts * unit;
  }

  void clear(C* row) const {
    for (int64_t i = 0; i < columns_; ++i) row[i] = 0;
  }

  void store_position(int64_t place) const {
    T* out = static_cast<T*>(b_.position_gradient) + place * dim_;
    for_runs(dim_, [&](int64_t i, auto count) {
      store_run(load_values<T>(memory_.row(2) + i), out + i, count);
    });
  }

  /// Adds the gradient of the token's sum to those of its type and position and writes it.
  template <typename Value>
  void write(const Token& token, const Value& value) const {
    C* position = b_.position_gradient == nullptr ? nullptr : memory_.row(2);
    C* type = nullptr;
    if (b_.type_gradient != nullptr) type = partial_ + (2 + index_of(a_.type, token)) * columns_;
    const auto add = [&](int64_t i, auto count) {
      const Run<T> result = value(i, count);
      if (position != nullptr) add_values(result, position + i);
      if (type != nullptr) add_values(result, type + i);
      return result;
    };
    if (b_.sum_gradient == nullptr) {
      for_runs(dim_, add);
    } else {
      write_row(dim_, streamed_, static_cast<T*>(b_.sum_gradient) + row_of(a_, token) * dim_, add);
    }
  }

  void through_token(const Token& token) {
    const int64_t row = row_of(a_, token);
    const T* from = static_cast<const T*>(b_.gradient) + row * dim_;
    const T* soon = static_cast<const T*>(b_.gradient) + row_of(a_, tokens_.soon()) * dim_;
    const C* factors = factors_.at(static_cast<uint64_t>(row * dim_), dim_);
    const auto gradient = [&](int64_t i, auto count) {
      prefetch_run(soon + i);
      const Run<T> given = load_run(from + i, count);
      return factors == nullptr ? given : given * load_values<T>(factors + i);
    };
    if (a_.norm == Norm::none) {
      write(token, gradient);
    } else {
      through_norm(token, gradient);
    }
  }

  /// From the gradient of the norm's output to that of its input.
  template <typename Gradient>
  void through_norm(const Token& token, const Gradient& gradient) {
    const int64_t row = row_of(a_, token);
    const C mean = b_.mean == nullptr ? C(0) : static_cast<const C*>(b_.mean)[row];
    const C rstd = static_cast<const C*>(b_.rstd)[row];
    const Rows<T> rows = tokens_.rows();
    const C* weight = weight_.values();
    C *normalised = memory_.row(0), *weighted = memory_.row(1);
    Run<T> along{}, total{};
    for_runs(dim_, [&](int64_t i, auto count) {
      const Run<T> x = (sum_at(rows, i, count) - mean) * rstd;
      Run<T> g = gradient(i, count);
      if (weight != nullptr) {
        add_values(g * x, partial_ + i);
        add_values(g, partial_ + columns_ + i);
        g = g * load_values<T>(weight + i);
      }
      store_values(x, normalised + i);
      store_values(g, weighted + i);
      along = along + g * x;
      total = total + g;
    });
    const C slope = core::sum(along) / static_cast<C>(dim_);
    const C offset = a_.norm == Norm::layer ? core::sum(total) / static_cast<C>(dim_) : C(0);
    write(token, [&](int64_t i, auto) {
      const Run<T> x = load_values<T>(normalised + i), g = load_values<T>(weighted + i);
      return (g - offset - x * slope) * rstd;
    });
  }

  const BackwardArguments& b_;
  const Arguments& a_;
  int64_t dim_, columns_;
  bool streamed_;
  RowMemory<C> memory_;  // normalised and weighted row, the position's gradient
  TokenRows<T> tokens_;
  DropFactors<T> factors_;
  ValueRow<T> weight_;
  C* partial_;
};

/// Where sum `number` of the parts belongs; nullptr: nowhere.
template <typename T>
T* sum_target(const BackwardArguments& b, int64_t number) {
  if (number == 0) return static_cast<T*>(b.weight_gradient);
  if (number == 1) return static_cast<T*>(b.bias_gradient);
  return static_cast<T*>(b.type_gradient) + (number - 2) * b.input.embedding_dim;
}

template <typename T>
void add_sums(const BackwardArguments& b, int64_t begin, int64_t end) {
  const int64_t columns = partial_columns(b.input.embedding_dim), stride = sums_of(b) * columns;
  for (int64_t number = begin; number < end; ++number) {
    T* out = sum_target<T>(b, number);
    if (out == nullptr) continue;
    const auto* from = static_cast<const Compute<T>*>(b.partial) + number * columns;
    for_runs(b.input.embedding_dim, [&](int64_t i, auto count) {
      Run<T> total{};
      for (int64_t part = 0; part < b.parts; ++part) {
        total = total + load_values<T>(from + part * stride + i);
      }
      store_run(total, out + i, count);
    });
  }
}

// ---- dropout alone ----

// Long inputs are dropped out piece by piece, as if each piece were a row.
constexpr int64_t piece = 1024;

template <typename T>
void drop_range(const DropoutArguments& d, int64_t begin, int64_t end) {
  DropFactors<T> factors(d.probability, d.seed, piece);
  for (int64_t first = begin; first < end; first += piece) {
    const int64_t columns = end - first < piece ? end - first : piece;
    const T* x = static_cast<const T*>(d.x) + first;
    const Compute<T>* factor = factors.at(static_cast<uint64_t>(first), columns);
    write_row(columns, false, static_cast<T*>(d.out) + first, [&](int64_t i, auto count) {
      return load_run(x + i, count) * load_values<T>(factor + i);
    });
  }
}

}  // namespace

void forward(const ForwardArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.input.scalar, [&](auto tag) {
    forward_range<typename decltype(tag)::type>(arguments, begin, end);
  });
}

void backward(const BackwardArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.input.scalar, [&](auto tag) {
    for (int64_t number = begin; number < end; ++number) {
      BackwardPart<typename decltype(tag)::type>(arguments, number).run(number);
    }
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
