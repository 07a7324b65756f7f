// A token's row is summed into a buffer that stays in the first-level cache, where norm and dropout
// work on it; memory sees each table row once and the output once. Sums give the same bits on
// every instruction set.
#include <cmath>
#include <cstdlib>

#include "core/lane_sum.h"
#include "core/philox.h"
#include "input/kernel.h"

namespace posembed::input::POSEMBED_ISA {
namespace {

using core::Compute;
using core::lane_sum;
using core::load;
using core::store;

/// Memory for one call; std::vector's members would be shared between instruction sets.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : data_(std::malloc(static_cast<size_t>(bytes))) {}
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_;
};

struct Token {
  int64_t batch, place;
};

Token token_at(const Arguments& a, int64_t number) { return {number % a.batch, number / a.batch}; }

/// The token's place in [batch, seq].
int64_t row_of(const Arguments& a, const Token& token) { return token.batch * a.seq + token.place; }

template <typename T>
const T* table_row(const Table& table, const Token& token) {
  int64_t index = table.offset + token.place;
  if (table.index.data != nullptr) {
    index = read(table.index,
                 token.batch * table.index_stride[0] + token.place * table.index_stride[1]);
  }
  return static_cast<const T*>(table.data) + (index + table.first_row) * table.stride;
}

template <typename T, typename C>
void add_row(const T* POSEMBED_RESTRICT row, int64_t dim, C* POSEMBED_RESTRICT sum) {
  for (int64_t i = 0; i < dim; ++i) sum[i] += load(row[i]);
}

template <typename T, typename C>
void sum_rows(const Arguments& a, const Token& token, C* POSEMBED_RESTRICT sum) {
  const T* row = table_row<T>(a.token, token);
  const auto scale = static_cast<C>(a.scale);
  for (int64_t i = 0; i < a.embedding_dim; ++i) sum[i] = load(row[i]) * scale;
  if (a.type.data != nullptr) add_row(table_row<T>(a.type, token), a.embedding_dim, sum);
  if (a.position.data != nullptr) add_row(table_row<T>(a.position, token), a.embedding_dim, sum);
  if (a.encoding != nullptr) {
    const int64_t at = token.batch * a.encoding_stride[0] + token.place * a.encoding_stride[1];
    add_row(static_cast<const C*>(a.encoding) + at, a.embedding_dim, sum);
  }
}

template <typename C>
struct Statistics {
  C mean = 0;
  C rstd = 1;
};

template <typename C>
Statistics<C> statistics(const Arguments& a, const C* POSEMBED_RESTRICT sum) {
  const int64_t dim = a.embedding_dim;
  Statistics<C> result;
  if (a.norm == Norm::layer)
    result.mean = lane_sum<C>(dim, [=](int64_t i) { return sum[i]; }) / static_cast<C>(dim);
  const C mean = result.mean;
  const C squares = lane_sum<C>(dim, [=](int64_t i) { return (sum[i] - mean) * (sum[i] - mean); });
  result.rstd = C(1) / std::sqrt(squares / static_cast<C>(dim) + static_cast<C>(a.eps));
  return result;
}

template <typename C>
void normalise(const Statistics<C>& statistics, int64_t dim, C* POSEMBED_RESTRICT row) {
  const auto [mean, rstd] = statistics;
  for (int64_t i = 0; i < dim; ++i) row[i] = (row[i] - mean) * rstd;
}

template <typename T, typename C>
void multiply(const T* POSEMBED_RESTRICT weight, int64_t dim, C* POSEMBED_RESTRICT row) {
  for (int64_t i = 0; i < dim; ++i) row[i] *= load(weight[i]);
}

template <typename T, typename C>
void store_row(const C* POSEMBED_RESTRICT row, int64_t dim, T* POSEMBED_RESTRICT out) {
  for (int64_t i = 0; i < dim; ++i) store(row[i], out + i);
}

// ---- dropout ----

/// Words for `count` elements take part in whole calls of philox: up to three more at each end.
constexpr int64_t random_words(int64_t count) { return count + 8; }

/// Multiplies row, which begins with element `first`, by its factors. `words`: random_words(dim) of
/// memory.
template <typename C>
void drop_row(const core::Dropout& dropout, uint64_t first, int64_t dim,
              uint32_t* POSEMBED_RESTRICT words, C* POSEMBED_RESTRICT row) {
  const uint64_t counter = first / 4;
  const auto calls = static_cast<int64_t>((first + static_cast<uint64_t>(dim) + 3) / 4 - counter);
  for (int64_t i = 0; i < calls; ++i) {
    const core::Random4 random = core::philox(dropout.seed, counter + static_cast<uint64_t>(i));
    for (int64_t k = 0; k < 4; ++k) words[4 * i + k] = random.words[k];
  }
  const uint32_t* word = words + first % 4;
  const auto scale = static_cast<C>(dropout.scale);
  for (int64_t i = 0; i < dim; ++i) row[i] *= word[i] < dropout.threshold ? C(0) : scale;
}

core::Dropout dropout_of(double probability, const int64_t* seed) {
  return core::make_dropout(probability, seed == nullptr ? 0 : static_cast<uint64_t>(*seed));
}

// ---- forward ----

template <typename T>
void forward_range(const ForwardArguments& f, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const Arguments& a = f.input;
  const int64_t dim = a.embedding_dim;
  const Scratch sum_memory(dim * static_cast<int64_t>(sizeof(C)));
  const Scratch word_memory(random_words(dim) * static_cast<int64_t>(sizeof(uint32_t)));
  C* sum = sum_memory.as<C>();
  const core::Dropout dropout = dropout_of(a.dropout, a.seed);
  for (int64_t number = begin; number < end; ++number) {
    const Token token = token_at(a, number);
    const int64_t row = row_of(a, token);
    sum_rows<T>(a, token, sum);
    if (a.norm != Norm::none) {
      const Statistics<C> found = statistics(a, sum);
      if (f.rstd != nullptr) static_cast<C*>(f.rstd)[row] = found.rstd;
      if (f.mean != nullptr) static_cast<C*>(f.mean)[row] = found.mean;
      normalise(found, dim, sum);
      if (a.norm_weight != nullptr) multiply(static_cast<const T*>(a.norm_weight), dim, sum);
      if (a.norm_bias != nullptr) add_row(static_cast<const T*>(a.norm_bias), dim, sum);
    }
    if (a.seed != nullptr) {
      drop_row(dropout, static_cast<uint64_t>(row * dim), dim, word_memory.as<uint32_t>(), sum);
    }
    store_row(sum, dim, static_cast<T*>(f.out) + row * dim);
  }
}

// ---- backward ----

/// A part's sums for the gradients of the norm's weight and bias.
template <typename C>
struct Part {
  C* weight;
  C* bias;
};

template <typename C>
void add_to_part(const C* POSEMBED_RESTRICT normalised, const C* POSEMBED_RESTRICT gradient,
                 int64_t dim, const Part<C>& part) {
  C* POSEMBED_RESTRICT weight = part.weight;
  C* POSEMBED_RESTRICT bias = part.bias;
  for (int64_t i = 0; i < dim; ++i) {
    weight[i] += gradient[i] * normalised[i];
    bias[i] += gradient[i];
  }
}

/// From the gradient of the normalised row to that of the row itself.
template <typename C>
void through_norm(Norm norm, C rstd, const C* POSEMBED_RESTRICT normalised, int64_t dim,
                  C* POSEMBED_RESTRICT gradient) {
  const C along = lane_sum<C>(dim, [=](int64_t i) { return gradient[i] * normalised[i]; }) /
                  static_cast<C>(dim);
  const C mean = norm == Norm::layer ? lane_sum<C>(dim, [=](int64_t i) { return gradient[i]; }) /
                                           static_cast<C>(dim)
                                     : C(0);
  for (int64_t i = 0; i < dim; ++i)
    gradient[i] = rstd * (gradient[i] - mean - normalised[i] * along);
}

template <typename T>
void backward_part(const BackwardArguments& b, int64_t number) {
  using C = Compute<T>;
  const Arguments& a = b.input;
  const int64_t dim = a.embedding_dim, tokens = a.batch * a.seq;
  const Scratch memory(2 * dim * static_cast<int64_t>(sizeof(C)));
  const Scratch word_memory(random_words(dim) * static_cast<int64_t>(sizeof(uint32_t)));
  C* gradient = memory.as<C>();
  C* normalised = gradient + dim;
  const core::Dropout dropout = dropout_of(a.dropout, a.seed);
  Part<C> part{static_cast<C*>(b.partial) + 2 * number * dim,
               static_cast<C*>(b.partial) + (2 * number + 1) * dim};
  if (b.partial != nullptr) {
    for (int64_t i = 0; i < 2 * dim; ++i) part.weight[i] = 0;
  }
  for (int64_t at = number * tokens / b.parts; at < (number + 1) * tokens / b.parts; ++at) {
    const Token token = token_at(a, at);
    const int64_t row = row_of(a, token);
    const T* from = static_cast<const T*>(b.gradient) + row * dim;
    for (int64_t i = 0; i < dim; ++i) gradient[i] = load(from[i]);
    if (a.seed != nullptr) {
      drop_row(dropout, static_cast<uint64_t>(row * dim), dim, word_memory.as<uint32_t>(),
               gradient);
    }
    if (a.norm != Norm::none) {
      const C mean = b.mean == nullptr ? C(0) : static_cast<const C*>(b.mean)[row];
      const Statistics<C> known{mean, static_cast<const C*>(b.rstd)[row]};
      sum_rows<T>(a, token, normalised);
      normalise(known, dim, normalised);
      if (b.partial != nullptr) add_to_part(normalised, gradient, dim, part);
      if (a.norm_weight != nullptr) multiply(static_cast<const T*>(a.norm_weight), dim, gradient);
      through_norm(a.norm, known.rstd, normalised, dim, gradient);
    }
    store_row(gradient, dim, static_cast<T*>(b.sum_gradient) + row * dim);
  }
}

template <typename T>
void add_part_columns(const BackwardArguments& b, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const int64_t dim = b.input.embedding_dim;
  for (int64_t i = begin; i < end; ++i) {
    C weight = 0, bias = 0;
    for (int64_t part = 0; part < b.parts; ++part) {
      const C* sums = static_cast<const C*>(b.partial) + 2 * part * dim + i;
      weight += sums[0];
      bias += sums[dim];
    }
    store(weight, static_cast<T*>(b.weight_gradient) + i);
    if (b.bias_gradient != nullptr) store(bias, static_cast<T*>(b.bias_gradient) + i);
  }
}

// Long inputs are dropped out piece by piece, as if each piece were a row.
constexpr int64_t piece = 1024;

template <typename T>
void drop_range(const DropoutArguments& d, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const core::Dropout dropout = dropout_of(d.probability, d.seed);
  C row[piece];
  uint32_t words[random_words(piece)];
  for (int64_t first = begin; first < end; first += piece) {
    const int64_t count = end - first < piece ? end - first : piece;
    const T* x = static_cast<const T*>(d.x) + first;
    for (int64_t i = 0; i < count; ++i) row[i] = load(x[i]);
    drop_row(dropout, static_cast<uint64_t>(first), count, words, row);
    store_row(row, count, static_cast<T*>(d.out) + first);
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
    for (int64_t part = begin; part < end; ++part) {
      backward_part<typename decltype(tag)::type>(arguments, part);
    }
  });
}

void add_parts(const BackwardArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.input.scalar, [&](auto tag) {
    add_part_columns<typename decltype(tag)::type>(arguments, begin, end);
  });
}

void drop(const DropoutArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    drop_range<typename decltype(tag)::type>(arguments, begin, end);
  });
}

}  // namespace posembed::input::POSEMBED_ISA
