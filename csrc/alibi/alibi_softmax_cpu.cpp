// Softmax of biased scores, and its gradients. Each row's scores are read once; intermediate
// results stay in the cache in float32.
#include <vector>

#include "alibi/alibi_cpu.h"
#include "core/exp.h"
#include "core/stream.h"

namespace posembed::alibi::POSEMBED_ISA {
namespace {

/// Floats of a row, with room for whole blocks.
class RowBuffer {
 public:
  explicit RowBuffer(int64_t keys)
      : floats_(static_cast<size_t>((keys + block - 1) / block * block)) {}
  float* data() { return floats_.data(); }

 private:
  std::vector<float> floats_;
};

POSEMBED_INLINE FloatPair read_pair(const float* in) { return core::load_pair(in); }

/// Stores a pair in the order of its vectors, without rounding.
POSEMBED_INLINE void write_pair(FloatPair pair, float* out) { core::store_pair(pair, out); }

POSEMBED_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

inline float largest(Floats values) {
  float result = values[0];
  for (int64_t lane = 1; lane < lanes; ++lane) result = std::max(result, values[lane]);
  return result;
}

inline float sum_of(Floats values) {
  float result = 0;
  for (int64_t lane = 0; lane < lanes; ++lane) result += values[lane];
  return result;
}

/// Softmax of rows of 16-bit and float32 scores.
template <typename T>
class Softmax {
 public:
  explicit Softmax(const ScoreArguments& arguments)
      : arguments_(arguments),
        distances_(arguments.distances),
        scale_(static_cast<float>(arguments.scale)),
        rows_(arguments.distances),
        buffer_(arguments.distances.keys) {}

  void row(const Row& row) {
    const auto line = bias_line<float>(arguments_.slopes, distances_, row.batch, row.head);
    const T* in = row_data<T>(arguments_.in, row);
    T* out = row_data<T>(arguments_.out, row);
    if (is_plain(distances_)) {
      read_plain(in, line, row.query);
      exponentiate();
      write<true>(out);
    } else {
      read(in, line, rows_.at(row));
      exponentiate();
      write<false>(out);
    }
  }

 private:
  /// Writes the biased scores of visible keys to the buffer, in the order of T's vectors.
  void read_plain(const T* in, const BiasLine<float>& line, int64_t query) {
    Floats max_score = broadcast(-INFINITY);
    const auto keep = [&](FloatPair scores, int64_t key) {
      write_pair(scores, buffer_.data() + key);
      max_score = larger(larger(scores.first, scores.second), max_score);
    };
    end_ = for_each_block<T>(
        line, distances_, distances_.offset + query, distances_.keys,
        [&](int64_t key, const BlockBias& biases) {
          prefetch_scores(in + key);
          keep(biases.added_to(core::load_pair(in + key), scale_), key);
        },
        [&](int64_t key, const BlockBias& biases, const PartialBlock& partial) {
          keep(partial.masked(biases.added_to(core::load_pair(in + key, partial.count), scale_)),
               key);
        });
    max_score_ = largest(max_score);
  }

  /// The same in the order of keys.
  void read(const T* in, const BiasLine<float>& line, const int32_t* distance) {
    float* buffer = buffer_.data();
    end_ = distances_.keys;
    max_score_ = -INFINITY;
    for (int64_t key = 0; key < end_; ++key) {
      buffer[key] = biased(line, distance[key], core::load(in[key]), scale_);
    }
    std::fill(buffer + end_, buffer + blocks_end(), -INFINITY);
    for (int64_t key = 0; key < end_; ++key)
      max_score_ = buffer[key] > max_score_ ? buffer[key] : max_score_;
  }

  int64_t blocks_end() const { return (end_ + block - 1) / block * block; }

  void exponentiate() {
    const Floats max_score = broadcast(max_score_ == -INFINITY ? 0.0f : max_score_);
    Floats first = {}, second = {};
    for (int64_t key = 0; key < end_; key += block) {
      FloatPair value = read_pair(buffer_.data() + key);
      value.first = core::exp_of_negative<Floats, Words>(value.first - max_score);
      value.second = core::exp_of_negative<Floats, Words>(value.second - max_score);
      first += value.first;
      second += value.second;
      write_pair(value, buffer_.data() + key);
    }
    const float sum = sum_of(first + second);
    factor_ = sum == 0 ? 0.0f : 1 / sum;  // all keys hidden: zeros, as attention over no key gives
  }

  template <bool in_order_of_vectors>
  void write(T* out) {
    const float* buffer = buffer_.data();
    int64_t key = 0;
    if constexpr (in_order_of_vectors) {
      for (; key + block <= end_; key += block) core::store_pair(weights(key), out + key);
      if (key < end_) core::store_pair(weights(key), out + key, end_ - key);
    } else {
      for (; key < end_; ++key) core::store(buffer[key] * factor_, out + key);
    }
    std::fill(out + end_, out + distances_.keys, T{});
  }

  FloatPair weights(int64_t key) {
    const FloatPair value = read_pair(buffer_.data() + key);
    return {value.first * factor_, value.second * factor_};
  }

  const ScoreArguments& arguments_;
  const Distances& distances_;
  const float scale_;
  RowDistances rows_;
  RowBuffer buffer_;
  int64_t end_ = 0;  // keys from here on are hidden
  float max_score_ = 0;
  float factor_ = 0;
};

/// Softmax of rows of float64 scores.
template <>
class Softmax<double> {
 public:
  explicit Softmax(const ScoreArguments& arguments)
      : arguments_(arguments), rows_(arguments.distances) {}

  void row(const Row& row) {
    const int64_t keys = arguments_.distances.keys;
    const auto line =
        bias_line<double>(arguments_.slopes, arguments_.distances, row.batch, row.head);
    const int32_t* distance = rows_.at(row);
    const double* in = row_data<double>(arguments_.in, row);
    double* out = row_data<double>(arguments_.out, row);
    double max_score = -INFINITY, sum = 0;
    for (int64_t key = 0; key < keys; ++key) {
      out[key] = biased(line, distance[key], in[key], arguments_.scale);
      max_score = out[key] > max_score ? out[key] : max_score;
    }
    max_score = max_score == -INFINITY ? 0.0 : max_score;
    for (int64_t key = 0; key < keys; ++key) sum += out[key] = std::exp(out[key] - max_score);
    for (int64_t key = 0; key < keys; ++key) out[key] = sum == 0 ? 0.0 : out[key] / sum;
  }

 private:
  const ScoreArguments& arguments_;
  RowDistances rows_;
};

// ------------------------------------------------------------------------------------- backward

/// Gradients through the softmax of one row, in T's compute type.
template <typename T>
class SoftmaxBackward {
 public:
  using C = Compute<T>;

  explicit SoftmaxBackward(const SoftmaxBackwardArguments& arguments)
      : arguments_(arguments),
        distances_(arguments.distances),
        rows_(arguments.distances),
        grad_(static_cast<size_t>(arguments.distances.keys)),
        weights_(grad_.size()) {}

  void row(const Row& row, int64_t number) {
    const int64_t end = visible_end(row.query);
    load(row_data<T>(arguments_.grad, row), end, grad_.data());
    load(row_data<T>(arguments_.weights, row), end, weights_.data());
    double mean = dot(end);
    // Hidden keys have weight 0. Only where their memory holds NaN does the sum show them.
    const bool hides = !std::isfinite(mean) && !is_plain(distances_) && distances_.apply_mask;
    const bool sums = arguments_.slopes.sides > 0;
    const int32_t* distance = hides || (sums && !is_plain(distances_)) ? rows_.at(row) : nullptr;
    if (hides) {
      hide(distance, grad_.data());
      hide(distance, weights_.data());
      mean = dot(end);
    }
    // The gradient of biased scores overwrites the weights, which are no longer needed.
    const auto shift = static_cast<C>(mean);
    for (int64_t key = 0; key < end; ++key) weights_[at(key)] *= grad_[at(key)] - shift;
    if (hides) hide(distance, weights_.data());
    write(row_data<T>(arguments_.out, row), end);
    if (sums) sum_up(row, number, end, distance);
  }

 private:
  static size_t at(int64_t key) { return static_cast<size_t>(key); }

  /// Keys from here on have weight 0.
  int64_t visible_end(int64_t query) const {
    if (!is_plain(distances_) || !distances_.causal || !distances_.apply_mask)
      return distances_.keys;
    return std::clamp<int64_t>(distances_.offset + query + 1, 0, distances_.keys);
  }

  static void load(const T* in, int64_t count, C* out) {
    for (int64_t i = 0; i < count; ++i) out[i] = core::load(in[i]);
  }

  void hide(const int32_t* distance, C* values) const {
    for (int64_t key = 0; key < distances_.keys; ++key) {
      if (distance[key] == hidden) values[key] = C(0);
    }
  }

  double dot(int64_t count) const {
    double sums[partial_sums] = {};
    int64_t i = 0;
    for (; i + partial_sums <= count; i += partial_sums) {
      for (int64_t part = 0; part < partial_sums; ++part) {
        sums[part] += static_cast<double>(grad_[at(i + part)]) * weights_[at(i + part)];
      }
    }
    for (int64_t part = 0; i < count; ++i, ++part) {
      sums[part] += static_cast<double>(grad_[at(i)]) * weights_[at(i)];
    }
    return total(sums);
  }

  void write(T* out, int64_t end) const {
    const auto scale = static_cast<C>(arguments_.scale);
    for (int64_t key = 0; key < end; ++key) core::store(weights_[at(key)] * scale, out + key);
    std::fill(out + end, out + distances_.keys, T{});
  }

  void sum_up(const Row& row, int64_t number, int64_t end, const int32_t* distance) {
    const SlopeGradient& gradient = arguments_.slopes;
    std::fill(weights_.begin() + end, weights_.end(), C(0));
    const SlopeSums sums = is_plain(distances_)
                               ? slope_sums(weights_.data(), distances_, row.query)
                               : slope_sums(weights_.data(), distance, distances_.keys);
    store_sums(sums, gradient, number, arguments_.batch * gradient.heads * distances_.queries);
  }

  const SoftmaxBackwardArguments& arguments_;
  const Distances& distances_;
  RowDistances rows_;
  std::vector<C> grad_;
  std::vector<C> weights_;
};

}  // namespace

void softmax(const ScoreArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    Softmax<typename decltype(tag)::type> softmax(arguments);
    for (int64_t number = begin; number < end; ++number) {
      softmax.row(row_at(number, arguments.slopes.heads, arguments.distances.queries));
    }
  });
}

void softmax_backward(const SoftmaxBackwardArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    SoftmaxBackward<typename decltype(tag)::type> backward(arguments);
    for (int64_t number = begin; number < end; ++number) {
      backward.row(row_at(number, arguments.slopes.heads, arguments.distances.queries), number);
    }
  });
}

}  // namespace posembed::alibi::POSEMBED_ISA
