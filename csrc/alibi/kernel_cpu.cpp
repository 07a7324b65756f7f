// A head's bias depends on key - query only: every row of it is a window of one ramp, a step
// further along. The kernels compute a ramp for a tile of rows, in cache, and copy or add its
// windows.
#include <algorithm>

#include "alibi/bias.h"
#include "alibi/kernel.h"
#include "core/stream.h"
#include "core/vector.h"

namespace posembed::alibi::POSEMBED_ISA {
namespace {

using core::Compute;
using core::FloatPair;
using core::Floats;
using core::lanes;

constexpr int64_t tile_rows = 32;
constexpr int64_t tile_keys = 4096;
constexpr int64_t ramp_size = tile_keys + tile_rows;

/// Rows first … first + count - 1 of one head, of which the ramp covers keys [key, key + keys).
struct Tile {
  int64_t first;
  int64_t count;
  int64_t key;
  int64_t keys;

  /// Distances that the tile covers.
  int64_t distances() const { return keys + count - 1; }
};

/// Fills `ramp` with the bias of a tile and returns where the window of the tile's first row
/// begins; the next row's begins one element earlier.
template <typename C, typename T>
const T* fill_ramp(Line<C> line, const Distances& distances, const Tile& tile, T* ramp) {
  const int64_t last_query = distances.offset + tile.first + tile.count - 1;
  const auto start = static_cast<int32_t>(tile.key - last_query);
  const auto size = static_cast<int32_t>(tile.distances());
  for (int32_t i = 0; i < size; ++i) core::store(bias(line, start + i), ramp + i);
  return ramp + tile.count - 1;
}

/// Cuts rows [begin, end), numbered over all heads, into tiles of one head: visit(head, tile).
template <typename Visit>
void for_each_tile(const Distances& distances, int64_t begin, int64_t end, Visit visit) {
  while (begin < end) {
    const int64_t head = begin / distances.queries, first = begin % distances.queries;
    const int64_t count = std::min({tile_rows, distances.queries - first, end - begin});
    for (int64_t key = 0; key < distances.keys; key += tile_keys) {
      visit(head, Tile{first, count, key, std::min(tile_keys, distances.keys - key)});
    }
    begin += count;
  }
}

template <typename T>
void fill_range(const FillArguments& arguments, int64_t begin, int64_t end) {
  const Distances& distances = arguments.distances;
  T* const out = static_cast<T*>(arguments.out);
  const int64_t rows = arguments.slopes.heads * distances.queries;
  const bool streamed = rows * distances.keys * int64_t{sizeof(T)} >= core::stream_bytes;
  for_each_tile(distances, begin, end, [&](int64_t head, const Tile& tile) {
    const auto line = line_of<Compute<T>>(arguments.slopes, distances, head);
    T ramp[ramp_size];
    const T* window = fill_ramp(line, distances, tile, ramp);
    T* row = out + (head * distances.queries + tile.first) * distances.keys + tile.key;
    const int64_t bytes = tile.keys * int64_t{sizeof(T)};
    for (int64_t i = 0; i < tile.count; ++i, --window, row += distances.keys) {
      if (streamed) {
        core::stream_copy(row, window, bytes);
      } else {
        memcpy(row, window, static_cast<size_t>(bytes));
      }
    }
  });
  if (streamed) core::stream_fence();
}

/// The ramp of a tile, read in the order in which vectors of T take elements (core/vector.h).
template <typename T>
class Windows {
 public:
  Windows(Line<float> line, const Distances& distances, const Tile& tile)
      : first_(fill_ramp(line, distances, tile, ramp_) - ramp_) {
    std::fill_n(ramp_ + tile.distances(), 2 * lanes, 0.0f);  // the last vector reads past the end
  }

  int64_t first() const { return first_; }

  FloatPair at(int64_t start) const {
    return {core::load_vector<Floats>(ramp_ + start),
            core::load_vector<Floats>(ramp_ + start + lanes)};
  }

 private:
  float ramp_[ramp_size + 2 * lanes];
  int64_t first_;
};

/// A bfloat16 vector takes even and odd elements apart; a window that begins with an odd one swaps
/// the two.
template <>
class Windows<core::BFloat16> {
 public:
  Windows(Line<float> line, const Distances& distances, const Tile& tile) {
    float ramp[ramp_size + padding];
    first_ = fill_ramp(line, distances, tile, ramp) - ramp;
    std::fill_n(ramp + tile.distances(), padding, 0.0f);  // the last vectors read past the end
    for (int64_t i = 0; 2 * i + 2 <= tile.distances() + padding; ++i) {
      even_[i] = ramp[2 * i];
      odd_[i] = ramp[2 * i + 1];
    }
  }

  int64_t first() const { return first_; }

  FloatPair at(int64_t start) const {
    const float* even = even_ + (start + 1) / 2;
    const float* odd = odd_ + start / 2;
    const bool swap = start % 2 != 0;
    return {core::load_vector<Floats>(swap ? odd : even),
            core::load_vector<Floats>(swap ? even : odd)};
  }

 private:
  static constexpr int64_t padding = 2 * lanes + 2;
  float even_[(ramp_size + padding) / 2];
  float odd_[(ramp_size + padding) / 2];
  int64_t first_ = 0;
};

/// out = in + the window that begins at `start`; in and out are the same row or apart.
template <typename T>
void add_row(const T* in, const Windows<T>& windows, int64_t start, int64_t keys, T* out) {
  const auto sum = [&](FloatPair scores, int64_t i) -> FloatPair {
    const FloatPair bias = windows.at(start + i);
    return {scores.first + bias.first, scores.second + bias.second};
  };
  int64_t i = 0;
  for (; i + 2 * lanes <= keys; i += 2 * lanes) {
    core::store_pair(sum(core::load_pair(in + i), i), out + i);
  }
  if (const int64_t rest = keys - i; rest > 0) {
    core::store_pair(sum(core::load_pair(in + i, rest), i), out + i, rest);
  }
}

template <>
class Windows<double> {
 public:
  Windows(Line<double> line, const Distances& distances, const Tile& tile)
      : first_(fill_ramp(line, distances, tile, ramp_) - ramp_) {}

  int64_t first() const { return first_; }
  double at(int64_t place) const { return ramp_[place]; }

 private:
  double ramp_[ramp_size];
  int64_t first_;
};

void add_row(const double* in, const Windows<double>& windows, int64_t start, int64_t keys,
             double* out) {
#pragma GCC ivdep  // in and out are the same row or apart
  for (int64_t i = 0; i < keys; ++i) out[i] = in[i] + windows.at(start + i);
}

template <typename T>
void add_range(const AddArguments& arguments, int64_t begin, int64_t end) {
  const Distances& distances = arguments.distances;
  const int64_t heads = arguments.slopes.heads;
  for_each_tile(distances, begin, end, [&](int64_t plane, const Tile& tile) {
    const int64_t batch = plane / heads, head = plane % heads;
    const auto place = [&](const int64_t* stride) {
      return batch * stride[0] + head * stride[1] + tile.first * stride[2] + tile.key;
    };
    const auto line = line_of<Compute<T>>(arguments.slopes, distances, head);
    const Windows<T> windows(line, distances, tile);
    const T* in = static_cast<const T*>(arguments.in) + place(arguments.in_stride);
    T* out = static_cast<T*>(arguments.out) + place(arguments.out_stride);
    for (int64_t row = 0; row < tile.count; ++row) {
      add_row(in, windows, windows.first() - row, tile.keys, out);
      in += arguments.in_stride[2];
      out += arguments.out_stride[2];
    }
  });
}

/// Sum of grad[k] * (k - query) over keys [begin, end). Products of two float32 are exact in
/// double; the parts fix the order of the sum, whatever the width of the processor's vectors.
template <typename T>
double weighted_sum(const T* grad, int64_t begin, int64_t end, int64_t query) {
  constexpr int64_t parts = 16;
  double sum[parts] = {};
  int64_t key = begin;
  for (; key + parts <= end; key += parts) {
    const auto distance = static_cast<int32_t>(key - query);
    for (int32_t part = 0; part < parts; ++part) {
      sum[part] += static_cast<double>(core::load(grad[key + part])) * (distance + part);
    }
  }
  for (int64_t part = 0; key < end; ++key, ++part) {
    sum[part] += static_cast<double>(core::load(grad[key])) * static_cast<double>(key - query);
  }
  double total = 0;
  for (const double value : sum) total += value;
  return total;
}

/// Sums over all queries and the batch, for keys up to the query and for keys after it.
template <typename T>
Line<double> reduce_head(const ReduceArguments& arguments, int64_t head) {
  const Distances& distances = arguments.distances;
  Line<double> sum{0, 0};
  for (int64_t i = 0; i < arguments.batch * distances.queries; ++i) {
    const int64_t batch = i / distances.queries, row = i % distances.queries;
    const int64_t query = distances.offset + row;
    const int64_t split = std::clamp<int64_t>(query + 1, 0, distances.keys);
    const T* grad = static_cast<const T*>(arguments.grad) + batch * arguments.stride[0] +
                    head * arguments.stride[1] + row * arguments.stride[2];
    sum.before += weighted_sum(grad, 0, split, query);
    if (!distances.causal) sum.after -= weighted_sum(grad, split, distances.keys, query);
  }
  return sum;
}

template <typename T>
void reduce_range(const ReduceArguments& arguments, int64_t begin, int64_t end) {
  for (int64_t head = begin; head < end; ++head) {
    store_slope_gradient(reduce_head<T>(arguments, head), arguments, head);
  }
}

}  // namespace

void fill(const FillArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    fill_range<typename decltype(tag)::type>(arguments, begin, end);
  });
}

void add(const AddArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    add_range<typename decltype(tag)::type>(arguments, begin, end);
  });
}

void reduce(const ReduceArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    reduce_range<typename decltype(tag)::type>(arguments, begin, end);
  });
}

}  // namespace posembed::alibi::POSEMBED_ISA
