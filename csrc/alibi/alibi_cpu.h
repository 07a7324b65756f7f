// Shared by the CPU kernels: rows of matrices, and the biases and distances along a row. Biases
// that depend only on key - query are computed in registers; otherwise the row's distances are
// written to a buffer first. Included only by *_cpu.cpp files.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "alibi/alibi.h"
#include "core/prefetch.h"
#include "core/vector.h"

namespace posembed::alibi::POSEMBED_ISA {

using core::Compute;
using core::FloatPair;
using core::Floats;
using core::lanes;
using core::Words;

/// Elements in a block, which vectors process at a time.
inline constexpr int64_t block = 2 * lanes;

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
inline constexpr int64_t partial_sums = 32;

inline double total(const double* sums) {
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
inline void store_sums(const SlopeSums& sums, const SlopeGradient& gradient, int64_t number,
                       int64_t rows) {
  gradient.partial[number] = gradient.sides == 1 ? sums.before + sums.after : sums.before;
  if (gradient.sides == 2) gradient.partial[rows + number] = sums.after;
}

}  // namespace posembed::alibi::POSEMBED_ISA
