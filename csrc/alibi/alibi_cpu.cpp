// The bias, the bias added to scores, and the gradient of slopes. A head's plain bias depends only
// on key - query: each row is a window of one ramp, one step further along.
#include "alibi/alibi_cpu.h"

#include "core/stream.h"

namespace posembed::alibi::POSEMBED_ISA {
namespace {

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

}  // namespace posembed::alibi::POSEMBED_ISA
