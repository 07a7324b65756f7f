// The ALiBi formula, shared by CPU and CUDA: bias = -slope * |query position - key position|, and
// the rules that hide keys from a query.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "alibi/kernel.h"
#include "core/fma.h"
#include "core/macros.h"
#include "core/scalar.h"

namespace posembed::alibi {

/// A row of a matrix of scores: one query of one head.
struct Row {
  int64_t batch;
  int64_t head;
  int64_t query;
};

POSEMBED_INLINE Row row_at(int64_t number, int64_t heads, int64_t queries) {
  const int64_t plane = number / queries;
  return {plane / heads, plane % heads, number % queries};
}

template <typename T>
POSEMBED_INLINE T* row_data(const Matrices& matrices, const Row& row) {
  return static_cast<T*>(matrices.data) + row.batch * matrices.stride[0] +
         row.head * matrices.stride[1] + row.query * matrices.stride[2];
}

/// The distance that marks a key as hidden from the query.
inline constexpr int32_t hidden = std::numeric_limits<int32_t>::min();

/// The bias of one head as a function of distance = key position - query position: two half-lines
/// that meet at distance 0. Hidden keys get -infinity, or 0 to keep their scores.
template <typename C>
struct BiasLine {
  C before;
  C after;
  C hidden;
};

template <typename C>
POSEMBED_INLINE BiasLine<C> bias_line(const Slopes& slopes, const Distances& distances,
                                      int64_t batch, int64_t head) {
  const auto read = [&](int64_t index) {
    return core::read_floating<C>(slopes.data, slopes.scalar, batch * slopes.sample_stride + index);
  };
  return {read(head), -read(head + (slopes.sides - 1) * slopes.heads),
          distances.apply_mask ? -static_cast<C>(INFINITY) : C(0)};
}

template <typename C>
POSEMBED_INLINE C slope_at(const BiasLine<C>& line, int32_t distance) {
  return distance > 0 ? line.after : line.before;
}

/// Computed from the distance, so that it is exact at any position. Some models use slope * key
/// position, which loses precision at large positions.
template <typename C>
POSEMBED_INLINE C bias(const BiasLine<C>& line, int32_t distance) {
  return distance == hidden ? line.hidden : slope_at(line, distance) * static_cast<C>(distance);
}

/// A score with its bias. Hidden scores are not used: padding may hold NaN.
template <typename C>
POSEMBED_INLINE C biased(const BiasLine<C>& line, int32_t distance, C score, C scale) {
  const C scaled = score * scale;
  if (distance == hidden) return line.hidden < 0 ? line.hidden : scaled;
  return core::fma(slope_at(line, distance), static_cast<C>(distance), scaled);
}

/// The distance, or `hidden`, if only the order of positions decides what is visible.
POSEMBED_INLINE int32_t causal_distance(const Distances& distances, int32_t distance) {
  return distances.causal && distance > 0 ? hidden : distance;
}

/// Keys [begin, end).
struct KeyRange {
  int64_t begin;
  int64_t end;
};

/// The keys of the document that contains the query of row `row`; empty if no document does.
POSEMBED_INLINE KeyRange document_of(const Distances& distances, int64_t row) {
  if (distances.documents == 0) return {0, distances.keys};
  const int64_t key = distances.offset + row;       // of the query's token
  int64_t low = 0, high = distances.documents + 1;  // boundaries [0, low) are at or before `key`
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (core::read(distances.cu_seqlens, middle) <= key) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == 0 || low > distances.documents) return {0, 0};
  return {core::read(distances.cu_seqlens, low - 1), core::read(distances.cu_seqlens, low)};
}

POSEMBED_INLINE int64_t query_position(const Distances& distances, int64_t batch, int64_t row) {
  if (distances.query_positions.data == nullptr) return distances.offset + row;
  return core::read(distances.query_positions, batch * distances.query_stride + row);
}

POSEMBED_INLINE int64_t key_position(const Distances& distances, int64_t batch, int64_t key) {
  if (distances.key_positions.data == nullptr) return key;
  return core::read(distances.key_positions, batch * distances.key_stride + key);
}

POSEMBED_INLINE bool is_masked(const Distances& distances, int64_t batch, int64_t key) {
  return distances.mask != nullptr && !distances.mask[batch * distances.mask_stride + key];
}

/// Writes the gradient of one head's slopes, of one sample if each has its own, from the sums of
/// distance * grad on either side.
POSEMBED_INLINE void store_slope_gradient(double before, double after,
                                          const SlopeGradient& gradient, int64_t sample,
                                          int64_t head) {
  const int64_t first = sample * gradient.sides * gradient.heads + head;
  const auto write = [&](double value, int64_t index) {
    switch (gradient.scalar) {
      case core::Scalar::float64:
        return core::store(value, static_cast<double*>(gradient.out) + index);
      case core::Scalar::bfloat16:
        return core::store(static_cast<float>(value),
                           static_cast<core::BFloat16*>(gradient.out) + index);
      case core::Scalar::float16:
        return core::store(static_cast<float>(value),
                           static_cast<core::Float16*>(gradient.out) + index);
      default:
        return core::store(static_cast<float>(value), static_cast<float*>(gradient.out) + index);
    }
  };
  write(gradient.sides == 1 ? before + after : before, first);
  if (gradient.sides == 2) write(after, first + gradient.heads);
}

}  // namespace posembed::alibi
