// A head's bias depends on key - query only: every row of it is a window of one ramp, a step
// further along. The kernels compute a ramp for a tile of rows, in cache, and copy or add its
// windows.
#include <algorithm>

#include "alibi/bias.h"
#include "alibi/kernel.h"
#include "core/stream.h"

namespace posembed::alibi::POSEMBED_ISA {
namespace {

using core::Compute;

constexpr int64_t tile_rows = 32;
constexpr int64_t tile_keys = 4096;
constexpr int64_t ramp_size = tile_keys + tile_rows;

/// Rows first … first + count - 1 of one head, of which the ramp covers keys [key, key + keys).
struct Tile {
  int64_t first;
  int64_t count;
  int64_t key;
  int64_t keys;
};

/// Fills `ramp` with the bias of a tile and returns where the window of the tile's first row
/// begins; the next row's begins one element earlier.
template <typename C, typename T>
const T* fill_ramp(Line<C> line, const Distances& distances, const Tile& tile, T* ramp) {
  const int64_t last_query = distances.offset + tile.first + tile.count - 1;
  const auto start = static_cast<int32_t>(tile.key - last_query);
  const auto size = static_cast<int32_t>(tile.keys + tile.count - 1);
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

template <typename T>
void add_row(const T* in, const Compute<T>* window, int64_t keys, T* out) {
#pragma GCC ivdep  // in and out are the same row or apart
  for (int64_t i = 0; i < keys; ++i) core::store(core::load(in[i]) + window[i], out + i);
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
    Compute<T> ramp[ramp_size];
    const Compute<T>* window = fill_ramp(line, distances, tile, ramp);
    const T* in = static_cast<const T*>(arguments.in) + place(arguments.in_stride);
    T* out = static_cast<T*>(arguments.out) + place(arguments.out_stride);
    for (int64_t i = 0; i < tile.count; ++i, --window) {
      add_row(in, window, tile.keys, out);
      in += arguments.in_stride[2];
      out += arguments.out_stride[2];
    }
  });
}

/// Sum of grad[k] * (k - query) over keys [begin, end). Products of two float32 are exact in
/// double; the lanes fix the order of the sum, whatever the width of the processor's vectors.
template <typename T>
double weighted_sum(const T* grad, int64_t begin, int64_t end, int64_t query) {
  constexpr int64_t lanes = 16;
  double sum[lanes] = {};
  int64_t key = begin;
  for (; key + lanes <= end; key += lanes) {
    const auto distance = static_cast<int32_t>(key - query);
    for (int32_t lane = 0; lane < lanes; ++lane) {
      sum[lane] += static_cast<double>(core::load(grad[key + lane])) * (distance + lane);
    }
  }
  for (int64_t lane = 0; key < end; ++key, ++lane) {
    sum[lane] += static_cast<double>(core::load(grad[key])) * static_cast<double>(key - query);
  }
  double total = 0;
  for (const double part : sum) total += part;
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
