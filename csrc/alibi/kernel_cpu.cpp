// The bias, the bias added to scores, and the gradient of slopes. A head's plain bias depends on
// key - query only: every row of it is a window of one ramp, a step further along.
#include "alibi/rows.h"
#include "core/stream.h"

namespace posembed::alibi::POSEMBED_ISA {
namespace {

// ----------------------------------------------------------------------------------------- fill

constexpr int64_t tile_rows = 256;
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
const T* fill_ramp(const Line<C>& line, const Distances& distances, const Tile& tile, T* ramp) {
  const int64_t last_query = distances.offset + tile.first + tile.count - 1;
  const auto start = static_cast<int32_t>(tile.key - last_query);
  const auto size = static_cast<int32_t>(tile.keys + tile.count - 1);
  for (int32_t i = 0; i < size; ++i) core::store(bias(line, seen(distances, start + i)), ramp + i);
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
void fill_windows(const FillArguments& arguments, int64_t begin, int64_t end) {
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
void fill_rows(const FillArguments& arguments, int64_t begin, int64_t end) {
  const Distances& distances = arguments.distances;
  DistanceRows rows(distances);
  for (int64_t number = begin; number < end; ++number) {
    const Row row = row_at(number, arguments.slopes.heads, distances.queries);
    const auto line = line_of<Compute<T>>(arguments.slopes, distances, row.head);
    const int32_t* distance = rows.at(row);
    T* out = static_cast<T*>(arguments.out) + number * distances.keys;
    for (int64_t key = 0; key < distances.keys; ++key) {
      core::store(bias(line, distance[key]), out + key);
    }
  }
}

// ------------------------------------------------------------------------------------------ add

/// Far enough ahead for the next page: the processor's own prefetching stops at each page's end.
constexpr int64_t prefetch_bytes = 1024;

template <typename T>
void fill_hidden(T* begin, T* end) {
  T value;
  core::store(-static_cast<Compute<T>>(INFINITY), &value);
  std::fill(begin, end, value);
}

template <typename T>
void add_plain_row(const T* in, const Line<float>& line, const Distances& distances, int64_t query,
                   float scale, T* out) {
  const auto sum = [scale](FloatPair scores, FloatPair bias) -> FloatPair {
    return {scores.first * scale + bias.first, scores.second * scale + bias.second};
  };
  const int64_t end = for_blocks<T>(
      line, distances, query,
      [&](int64_t key, FloatPair bias) {
        __builtin_prefetch(reinterpret_cast<const char*>(in + key) + prefetch_bytes);
        core::store_pair(sum(core::load_pair(in + key), bias), out + key);
      },
      [&](int64_t key, FloatPair bias, const Edge& edge) {
        const FloatPair scores = core::load_pair(in + key, edge.count);
        core::store_pair(edge.hide(sum(scores, bias)), out + key, edge.count);
      });
  fill_hidden(out + end, out + distances.keys);
}

template <typename T>
void add_row(const T* in, const Line<Compute<T>>& line, const int32_t* distance, int64_t keys,
             Compute<T> scale, T* out) {
#pragma GCC ivdep  // in and out are the same row or apart
  for (int64_t key = 0; key < keys; ++key) {
    core::store(biased(line, distance[key], core::load(in[key]), scale), out + key);
  }
}

template <typename T>
void add_range(const ScoreArguments& arguments, int64_t begin, int64_t end) {
  const Distances& distances = arguments.distances;
  const auto scale = static_cast<Compute<T>>(arguments.scale);
  DistanceRows rows(distances);
  for (int64_t number = begin; number < end; ++number) {
    const Row row = row_at(number, arguments.slopes.heads, distances.queries);
    const auto line = line_of<Compute<T>>(arguments.slopes, distances, row.head);
    const T* in = elements<T>(arguments.in, row);
    T* out = elements<T>(arguments.out, row);
    if constexpr (!std::is_same_v<T, double>) {
      if (distances.plain()) {
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
  DistanceRows rows(distances);
  for (int64_t number = begin; number < end; ++number) {
    const Row row = row_at(number, gradient.heads, distances.queries);
    const T* grad = elements<T>(arguments.grad, row);
    const SlopeSums sums = distances.plain() ? slope_sums(grad, distances, row.query)
                                             : slope_sums(grad, rows.at(row), distances.keys);
    store_sums(sums, gradient, number, all);
  }
}

}  // namespace

void fill(const FillArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (arguments.distances.plain()) {
      fill_windows<T>(arguments, begin, end);
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
  const auto sum_of = [&](int64_t side, int64_t head) {
    double sum = 0;
    for (int64_t b = 0; b < batch; ++b) {
      const double* rows =
          gradient.partial + ((side * batch + b) * gradient.heads + head) * queries;
      for (int64_t query = 0; query < queries; ++query) sum += rows[query];
    }
    return sum;
  };
  for (int64_t head = 0; head < gradient.heads; ++head) {
    const double after = gradient.sides == 2 ? sum_of(1, head) : 0.0;
    store_slope_gradient(sum_of(0, head), after, gradient, head);
  }
}

}  // namespace posembed::alibi::POSEMBED_ISA
