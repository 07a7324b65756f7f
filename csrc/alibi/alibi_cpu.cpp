// The bias, the bias added to scores, the softmax of biased scores, and gradients. A head's plain
// bias depends only on key - query: each row is a window of one ramp, one step further along.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "alibi/alibi.h"
#include "core/stream.h"
#include "core/vector.h"

namespace posembed::alibi::POSEMBED_ISA {
namespace {

using core::Compute;
using core::FloatPair;
using core::Floats;
using core::lanes;
using core::Words;

// -------------------------------------------------------------------------------------------- rows
// Rows of matrices, and the biases and distances along a row. Biases that depend only on key -
// query are computed in registers; otherwise the row's distances are written to a buffer first.

/// Elements in a block, which vectors process at a time.
constexpr int64_t block = 2 * lanes;

using Ints = int32_t __attribute__((vector_size(sizeof(Floats))));

/// Integers of a block of T, in the order in which vectors hold its elements.
struct WordPair {
  Words first;
  Words second;
};

template <typename T>
POSEMBED_INLINE WordPair element_indices() {
  WordPair result;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    result.first[lane] = static_cast<uint32_t>(core::element_of_slot<T>(lane));
    result.second[lane] = static_cast<uint32_t>(core::element_of_slot<T>(lanes + lane));
  }
  return result;
}

POSEMBED_INLINE WordPair operator+(WordPair pair, int64_t value) {
  const auto word = static_cast<uint32_t>(value);
  return {pair.first + word, pair.second + word};
}

POSEMBED_INLINE Floats broadcast(float value) { return Floats{} + value; }

POSEMBED_INLINE FloatPair broadcast_pair(float value) {
  return {broadcast(value), broadcast(value)};
}

POSEMBED_INLINE FloatPair to_floats(WordPair integers) {
  return {__builtin_convertvector((Ints)integers.first, Floats),
          __builtin_convertvector((Ints)integers.second, Floats)};
}

POSEMBED_INLINE FloatPair select(WordPair condition, FloatPair yes, FloatPair no) {
  return {(Ints)condition.first != 0 ? yes.first : no.first,
          (Ints)condition.second != 0 ? yes.second : no.second};
}

POSEMBED_INLINE WordPair is_positive(WordPair value) {
  return {(Words)((Ints)value.first > 0), (Words)((Ints)value.second > 0)};
}

/// Prefetches ahead of the block at `in`, on Intel processors only: AMD's hardware prefetcher does
/// better on its own.
template <typename T>
POSEMBED_INLINE void prefetch_scores(const T* in) {
  if (core::is_intel) core::prefetch_ahead<block * sizeof(T)>(in);
}

/// The biases of a block of keys.
struct BlockBias {
  FloatPair slope;
  FloatPair distance;

  FloatPair values() const {
    return {slope.first * distance.first, slope.second * distance.second};
  }

  /// scores * scale + bias
  FloatPair added_to(FloatPair scores, float scale) const {
    return {core::fma(slope.first, distance.first, scores.first * scale),
            core::fma(slope.second, distance.second, scores.second * scale)};
  }
};

/// A block that is incomplete or has hidden keys.
struct PartialBlock {
  int64_t count;      // elements of the row
  WordPair excluded;  // nonzero: hidden, or beyond the row

  FloatPair masked(FloatPair scores) const {
    return select(excluded, broadcast_pair(-INFINITY), scores);
  }
};

/// Visits the biases of `keys` keys of a plain ALiBi for a query at `position`: calls whole(key,
/// biases) or part(key, biases, partial) for each block with visible keys. Returns the end of the
/// blocks; keys from there on are hidden.
template <typename T, typename Whole, typename Part>
POSEMBED_INLINE int64_t for_each_block(const BiasLine<float>& line, const Distances& distances,
                                       int64_t position, int64_t keys, Whole whole, Part part) {
  const int64_t split = std::clamp<int64_t>(position + 1, 0, keys);
  const bool hides = distances.causal && distances.apply_mask;
  const int64_t end = hides ? split : keys;
  const FloatPair before = broadcast_pair(line.before);
  const FloatPair after = broadcast_pair(distances.causal ? 0.0f : line.after);
  WordPair distance = element_indices<T>() + -position;
  int64_t key = 0;
  const auto advance = [&] {
    key += block;
    distance = distance + block;
  };
  const auto at_partial_block = [&] {
    const int64_t count = std::min(block, keys - key);
    const WordPair future = is_positive(distance);
    const WordPair outside = is_positive(element_indices<T>() + (1 - count));
    const BlockBias biases{select(future, after, before), to_floats(distance)};
    const Words hidden_lanes = Words{} - static_cast<uint32_t>(hides);
    part(key, biases,
         PartialBlock{count,
                      {outside.first | (future.first & hidden_lanes),
                       outside.second | (future.second & hidden_lanes)}});
    advance();
  };
  for (; key + block <= split; advance()) whole(key, BlockBias{before, to_floats(distance)});
  if (key < split) at_partial_block();
  for (; key + block <= end; advance()) whole(key, BlockBias{after, to_floats(distance)});
  if (key < end) at_partial_block();
  return std::min(key, keys);
}

/// The distances along any row, with hidden keys marked. Does not use std::vector, because
/// instruction sets would share its inline functions.
class RowDistances {
 public:
  explicit RowDistances(const Distances& distances) : distances_(distances) {}

  /// Valid until the next call.
  const int32_t* at(const Row& row) {
    if (row.batch != batch_) read_positions(row.batch);
    const auto query = static_cast<int32_t>(query_position(distances_, row.batch, row.query));
    const KeyRange document = document_of(distances_, row.query);
    int32_t* const distance = memory_.get();
    const int32_t* const position = distance + distances_.keys;
    std::fill(distance, distance + document.begin, hidden);
    std::fill(distance + document.end, distance + distances_.keys, hidden);
    for (int64_t key = document.begin; key < document.end; ++key) {
      distance[key] = causal_distance(distances_, position[key] - query);
    }
    if (distances_.mask != nullptr) hide_masked(row.batch, distance);
    return distance;
  }

 private:
  void read_positions(int64_t batch) {
    const int64_t keys = distances_.keys;
    if (batch_ < 0) memory_.reset(new int32_t[static_cast<size_t>(2 * keys)]);
    batch_ = batch;
    for (int64_t key = 0; key < keys; ++key) {
      memory_[static_cast<size_t>(keys + key)] =
          static_cast<int32_t>(key_position(distances_, batch, key));
    }
  }

  void hide_masked(int64_t batch, int32_t* distance) const {
    const bool* visible = distances_.mask + batch * distances_.mask_stride;
    for (int64_t key = 0; key < distances_.keys; ++key) {
      distance[key] = visible[key] ? distance[key] : hidden;
    }
  }

  const Distances& distances_;
  std::unique_ptr<int32_t[]> memory_;  // a row's distances, then the keys' positions
  int64_t batch_ = -1;
};

// ---------------------------------------------------------------------------- sums of distances

/// Sums of distance * grad over keys up to the query, and of -distance * grad over those after it.
struct SlopeSums {
  double before = 0;
  double after = 0;
};

/// Number of partial sums, which fixes the order of additions for any width of vectors.
constexpr int64_t partial_sums = 32;

double total(const double* sums) {
  double result = 0;
  for (int64_t part = 0; part < partial_sums; ++part) result += sums[part];
  return result;
}

/// Sum of grad[i] * (distance + i). Products of float32 and distances below 2^29 are exact in
/// double.
template <typename T>
double weighted_sum(const T* grad, int64_t count, int64_t distance) {
  double sums[partial_sums] = {};
  int64_t i = 0;
  for (; i + partial_sums <= count; i += partial_sums) {
    Compute<T> values[partial_sums];
    for (int64_t part = 0; part < partial_sums; ++part) values[part] = core::load(grad[i + part]);
    const auto first = static_cast<double>(distance + i);
    for (int32_t part = 0; part < partial_sums; ++part) {
      sums[part] += static_cast<double>(values[part]) * (first + part);
    }
  }
  for (int64_t part = 0; i < count; ++i, ++part) {
    sums[part] += static_cast<double>(core::load(grad[i])) * static_cast<double>(distance + i);
  }
  return total(sums);
}

/// The sums of a plain row.
template <typename T>
SlopeSums slope_sums(const T* grad, const Distances& distances, int64_t query) {
  const int64_t position = distances.offset + query;
  const int64_t split = std::clamp<int64_t>(position + 1, 0, distances.keys);
  const double before = weighted_sum(grad, split, -position);
  if (distances.causal) return {before, 0};
  return {before, -weighted_sum(grad + split, distances.keys - split, split - position)};
}

/// The sums of any row, from its distances.
template <typename T>
SlopeSums slope_sums(const T* grad, const int32_t* distance, int64_t keys) {
  double before[partial_sums] = {}, after[partial_sums] = {};
  for (int64_t key = 0; key < keys; ++key) {
    if (distance[key] == hidden) continue;
    const double product = static_cast<double>(core::load(grad[key])) * distance[key];
    (distance[key] > 0 ? after : before)[key % partial_sums] += product;
  }
  return {total(before), -total(after)};
}

/// Stores the sums of row `number` out of `rows`.
void store_sums(const SlopeSums& sums, const SlopeGradient& gradient, int64_t number,
                int64_t rows) {
  gradient.partial[number] = gradient.sides == 1 ? sums.before + sums.after : sums.before;
  if (gradient.sides == 2) gradient.partial[rows + number] = sums.after;
}

// ----------------------------------------------------------------------------------------- fill

constexpr int64_t tile_rows = 256;
constexpr int64_t tile_keys = 4096;
constexpr int64_t ramp_size = tile_keys + tile_rows;

/// Rows first … first + count - 1 of one head. One ramp serves their keys [begin, end).
struct Tile {
  int64_t batch;
  int64_t head;
  int64_t first;
  int64_t count;
  KeyRange keys;
};

/// Cuts rows [begin, end), numbered over all heads, into tiles.
template <typename Visit>
void for_each_tile(const Distances& distances, int64_t heads, int64_t begin, int64_t end,
                   Visit visit) {
  while (begin < end) {
    const Row row = row_at(begin, heads, distances.queries);
    const int64_t count = std::min({tile_rows, distances.queries - row.query, end - begin});
    for (int64_t key = 0; key < distances.keys; key += tile_keys) {
      visit(Tile{
          row.batch, row.head, row.query, count, {key, std::min(key + tile_keys, distances.keys)}});
    }
    begin += count;
  }
}

template <typename T>
void fill_hidden(T* begin, T* end) {
  T value;
  core::store(-static_cast<Compute<T>>(INFINITY), &value);
  std::fill(begin, end, value);
}

/// The biases of keys 0 … `size` - 1 for a query at `position`.
template <typename T>
void fill_ramp(const BiasLine<float>& line, const Distances& distances, int64_t position,
               int64_t size, T* ramp) {
  const int64_t end = for_each_block<T>(
      line, distances, position, size,
      [&](int64_t key, const BlockBias& biases) { core::store_pair(biases.values(), ramp + key); },
      [&](int64_t key, const BlockBias& biases, const PartialBlock& partial) {
        core::store_pair(partial.masked(biases.values()), ramp + key, partial.count);
      });
  fill_hidden(ramp + end, ramp + size);
}

void fill_ramp(const BiasLine<double>& line, const Distances& distances, int64_t position,
               int64_t size, double* ramp) {
  for (int64_t key = 0; key < size; ++key) {
    ramp[key] = bias(line, causal_distance(distances, static_cast<int32_t>(key - position)));
  }
}

/// The last query's row begins at the start of the ramp; each earlier query's row begins one
/// element later.
template <typename T>
void fill_tile(const FillArguments& arguments, const Tile& tile, bool streamed) {
  const Distances& distances = arguments.distances;
  const auto line = bias_line<Compute<T>>(arguments.slopes, distances, tile.batch, tile.head);
  const int64_t keys = tile.keys.end - tile.keys.begin, last = tile.first + tile.count - 1;
  T ramp[ramp_size];
  fill_ramp(line, distances, distances.offset + last - tile.keys.begin, keys + tile.count - 1,
            ramp);
  for (int64_t query = tile.first; query <= last; ++query) {
    T* out = row_data<T>(arguments.out, {tile.batch, tile.head, query}) + tile.keys.begin;
    const T* window = ramp + (last - query);
    if (streamed) {
      core::stream_copy(out, window, keys * int64_t{sizeof(T)});
    } else {
      memcpy(out, window, static_cast<size_t>(keys) * sizeof(T));
    }
  }
}

template <typename T>
void fill_tiles(const FillArguments& arguments, int64_t begin, int64_t end) {
  const Distances& distances = arguments.distances;
  const int64_t heads = arguments.slopes.heads;
  const int64_t elements = arguments.batch * heads * distances.queries * distances.keys;
  const bool streamed = elements * int64_t{sizeof(T)} >= core::stream_bytes;
  for_each_tile(distances, heads, begin, end,
                [&](const Tile& tile) { fill_tile<T>(arguments, tile, streamed); });
  if (streamed) core::stream_fence();
}

template <typename T>
void fill_rows(const FillArguments& arguments, int64_t begin, int64_t end) {
  const Distances& distances = arguments.distances;
  RowDistances rows(distances);
  for (int64_t number = begin; number < end; ++number) {
    const Row row = row_at(number, arguments.slopes.heads, distances.queries);
    const auto line = bias_line<Compute<T>>(arguments.slopes, distances, row.batch, row.head);
    const int32_t* distance = rows.at(row);
    T* out = row_data<T>(arguments.out, row);
    for (int64_t key = 0; key < distances.keys; ++key) {
      core::store(bias(line, distance[key]), out + key);
    }
  }
}

// ------------------------------------------------------------------------------------------ add

/// One row after another, which suits the hardware prefetcher.
template <typename T>
void add_plain_row(const T* in, const BiasLine<float>& line, const Distances& distances,
                   int64_t query, float scale, T* out) {
  const int64_t end = for_each_block<T>(
      line, distances, distances.offset + query, distances.keys,
      [&](int64_t key, const BlockBias& biases) {
        prefetch_scores(in + key);
        core::store_pair(biases.added_to(core::load_pair(in + key), scale), out + key);
      },
      [&](int64_t key, const BlockBias& biases, const PartialBlock& partial) {
        const FloatPair scores = core::load_pair(in + key, partial.count);
        core::store_pair(partial.masked(biases.added_to(scores, scale)), out + key, partial.count);
      });
  fill_hidden(out + end, out + distances.keys);
}

template <typename T>
void add_row(const T* in, const BiasLine<Compute<T>>& line, const int32_t* distance, int64_t keys,
             Compute<T> scale, T* out) {
#pragma GCC ivdep  // in and out are the same row or do not overlap
  for (int64_t key = 0; key < keys; ++key) {
    core::store(biased(line, distance[key], core::load(in[key]), scale), out + key);
  }
}

template <typename T>
void add_range(const ScoreArguments& arguments, int64_t begin, int64_t end) {
  const Distances& distances = arguments.distances;
  const auto scale = static_cast<Compute<T>>(arguments.scale);
  RowDistances rows(distances);
  for (int64_t number = begin; number < end; ++number) {
    const Row row = row_at(number, arguments.slopes.heads, distances.queries);
    const auto line = bias_line<Compute<T>>(arguments.slopes, distances, row.batch, row.head);
    const T* in = row_data<T>(arguments.in, row);
    T* out = row_data<T>(arguments.out, row);
    if constexpr (!std::is_same_v<T, double>) {
      if (is_plain(distances)) {
        add_plain_row(in, line, distances, row.query, scale, out);
        continue;
      }
    }
    add_row(in, line, rows.at(row), distances.keys, scale, out);
  }
}

// --------------------------------------------------------------------------------------- reduce

template <typename T>
void reduce_range(const ReduceArguments& arguments, int64_t begin, int64_t end) {
  const Distances& distances = arguments.distances;
  const SlopeGradient& gradient = arguments.slopes;
  const int64_t all = arguments.batch * gradient.heads * distances.queries;
  RowDistances rows(distances);
  for (int64_t number = begin; number < end; ++number) {
    const Row row = row_at(number, gradient.heads, distances.queries);
    const T* grad = row_data<T>(arguments.grad, row);
    const SlopeSums sums = is_plain(distances) ? slope_sums(grad, distances, row.query)
                                               : slope_sums(grad, rows.at(row), distances.keys);
    store_sums(sums, gradient, number, all);
  }
}

}  // namespace

void fill(const FillArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (is_plain(arguments.distances)) {
      fill_tiles<T>(arguments, begin, end);
    } else {
      fill_rows<T>(arguments, begin, end);
    }
  });
}

void add(const ScoreArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    add_range<typename decltype(tag)::type>(arguments, begin, end);
  });
}

void reduce(const ReduceArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    reduce_range<typename decltype(tag)::type>(arguments, begin, end);
  });
}

void reduce_heads(const SlopeGradient& gradient, int64_t batch, int64_t queries) {
  const int64_t samples = gradient.by_sample ? batch : 1,
                summed = batch / std::max<int64_t>(1, samples);
  const auto sum_of = [&](int64_t side, int64_t sample, int64_t head) {
    double sum = 0;
    for (int64_t b = sample; b < sample + summed; ++b) {
      const double* rows =
          gradient.partial + ((side * batch + b) * gradient.heads + head) * queries;
      for (int64_t query = 0; query < queries; ++query) sum += rows[query];
    }
    return sum;
  };
  for (int64_t sample = 0; sample < samples; ++sample) {
    for (int64_t head = 0; head < gradient.heads; ++head) {
      const double after = gradient.sides == 2 ? sum_of(1, sample, head) : 0.0;
      store_slope_gradient(sum_of(0, sample, head), after, gradient, sample, head);
    }
  }
}

namespace {

// ----------------------------------------------------------------------------------------- softmax
// Each row's scores are read once; intermediate results stay in the cache in float32.

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
      value.first = exp_of_negative<Floats, Words>(value.first - max_score);
      value.second = exp_of_negative<Floats, Words>(value.second - max_score);
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
