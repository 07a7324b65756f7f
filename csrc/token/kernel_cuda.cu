// Gather: a warp copies four 16-byte vectors per lane at a time. Backward: a stable radix sort of
// the ids, then a warp sums at most 64 rows of one id; for ids with more rows, the sums of such
// spans are added. Every row, zero or not, is written once. There are no atomics and every sum has
// one order, so results are deterministic.
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>

#include "core/device_item.h"
#include "core/device_store.h"
#include "core/device_vector.h"
#include "token/kernel.h"

namespace posembed::token {
namespace {

using core::Compute;
using core::divide_up;
using core::load;
using core::store;
using core::Vector;
using core::warp_size;

using core::blocks_for;
using core::Item;
using core::item_of_lane;
using core::threads;

// ---- gather ----

constexpr unsigned whole_warp = 0xffffffffu;
constexpr int gather_vectors = 4;  // per lane

/// A warp's share of the table: a piece of a wide row, or several narrow rows.
struct WarpLayout {
  int64_t pieces;    // of a row
  int vectors_log2;  // of a piece, for each lane; fewer than gather_vectors: of several rows
  int lanes_log2;    // of a row that needs no whole warp
};

WarpLayout warp_layout(int64_t dim, int width) {
  const int64_t vectors = divide_up(dim, width);
  WarpLayout layout{divide_up(vectors, gather_vectors * warp_size), 0, 0};
  while ((warp_size << layout.vectors_log2) < vectors &&
         1 << layout.vectors_log2 < gather_vectors) {
    ++layout.vectors_log2;
  }
  while (1 << layout.lanes_log2 < std::min<int64_t>(vectors, warp_size)) ++layout.lanes_log2;
  return layout;
}

/// The number of rows that a warp processes.
POSEMBED_INLINE int rows_of_warp(const WarpLayout& layout) {
  return (gather_vectors >> layout.vectors_log2) << (5 - layout.lanes_log2);
}

template <typename T, int width>
__global__ void __launch_bounds__(threads) gather_kernel(GatherArguments a, WarpLayout layout) {
  const int lane = threadIdx.x % warp_size;
  const int64_t item = int64_t{blockIdx.x} * core::warps + threadIdx.x / warp_size;
  const int64_t row = layout.pieces == 1 ? item : item / layout.pieces;
  const int64_t piece = item - row * layout.pieces;
  const int64_t first = row * rows_of_warp(layout) + (lane >> layout.lanes_log2);
  const int first_vector = lane & ((1 << layout.lanes_log2) - 1);
  const auto place_of = [&](int i) {
    return first + (int64_t{i >> layout.vectors_log2} << (5 - layout.lanes_log2));
  };
  const auto column_of = [&](int i) {
    const int vector = (i & ((1 << layout.vectors_log2) - 1)) * warp_size + first_vector;
    return (piece * gather_vectors * warp_size + vector) * width;
  };
  int64_t ids[gather_vectors];
#pragma unroll
  for (int i = 0; i < gather_vectors; ++i) {
    if (place_of(i) < a.count) ids[i] = read(a.ids, place_of(i));
  }
  Vector<T, width> vectors[gather_vectors] = {};
  bool valid[gather_vectors];
#pragma unroll
  for (int i = 0; i < gather_vectors; ++i) {
    valid[i] = false;
    const int64_t place = place_of(i), column = column_of(i);
    if (place >= a.count || column >= a.embedding_dim) continue;
    const auto from = static_cast<uint64_t>(ids[i]) + static_cast<uint64_t>(a.first_row);
    valid[i] = from < static_cast<uint64_t>(a.rows);
    if (valid[i]) {
      const T* data =
          static_cast<const T*>(a.weight) + static_cast<int64_t>(from) * a.weight_stride;
      vectors[i] = *reinterpret_cast<const Vector<T, width>*>(data + column);
    } else if (column == 0) {
      record_error(a.error, a.kind, ids[i], place, a.rows - a.first_row);
    }
  }
  const auto scale = static_cast<Compute<T>>(a.scale);
#pragma unroll
  for (int i = 0; i < gather_vectors; ++i) {
    const int64_t place = place_of(i), column = column_of(i);
    if (place >= a.count || column >= a.embedding_dim) continue;
    if (valid[i] && scale != 1) {
#pragma unroll
      for (T& value : vectors[i].values) store(load(value) * scale, &value);
    }
    T* to = static_cast<T*>(a.out) + place * a.embedding_dim;
    core::write_vector<T, width>(vectors[i], to + column);
  }
}

template <typename T, int width>
void launch_gather(const GatherArguments& a, cudaStream_t stream) {
  const WarpLayout layout = warp_layout(a.embedding_dim, width);
  const int64_t items = divide_up(a.count, rows_of_warp(layout)) * layout.pieces;
  core::launch(gather_kernel<T, width>, blocks_for(items), threads, stream, a, layout);
}

// ---- backward ----

using Key = uint32_t;
using Place = uint32_t;

struct Workspace {
  Key *unsorted_keys, *keys;
  Place *unsorted_places, *places;
  Key* ranks;           // rows form: number of groups up to each entry
  Key* firsts;          // for each row of the output, its first entry + 1; 0: none
  void *heads, *tails;  // sums of spans: first spans of long groups, and later ones
  void* sort;           // temporary memory of CUB
  size_t sort_bytes;    // the rest of the workspace
  size_t bytes;         // without them
};

int key_bits(int64_t num_embeddings) {
  int bits = 1;
  while (num_embeddings >> bits > 0) ++bits;  // the key num_embeddings marks omitted ids
  return bits;
}

size_t temporary_bytes(const BackwardArguments& a) {
  size_t sort = 0, scan = 0;
  cub::DeviceRadixSort::SortPairs(nullptr, sort, static_cast<const Key*>(nullptr),
                                  static_cast<Key*>(nullptr), static_cast<const Place*>(nullptr),
                                  static_cast<Place*>(nullptr), a.count, 0,
                                  key_bits(a.num_embeddings));
  cub::DeviceScan::InclusiveSum(nullptr, scan, static_cast<Key*>(nullptr),
                                static_cast<Key*>(nullptr), a.count);
  return sort > scan ? sort : scan;
}

size_t table_list_bytes(const BackwardArguments& a) {
  return static_cast<size_t>(a.num_embeddings) * sizeof(Key);
}

Workspace lay_out(const BackwardArguments& a) {
  Workspace w{};
  auto* base = static_cast<char*>(a.workspace);
  const auto take = [&](size_t bytes) {
    char* begin = base + w.bytes;
    w.bytes += static_cast<size_t>(divide_up(static_cast<int64_t>(bytes), 256)) * 256;
    return begin;
  };
  const size_t list = static_cast<size_t>(a.count) * sizeof(Key);
  w.unsorted_keys = reinterpret_cast<Key*>(take(list));
  w.keys = reinterpret_cast<Key*>(take(list));
  w.unsorted_places = reinterpret_cast<Place*>(take(list));
  w.places = reinterpret_cast<Place*>(take(list));
  const bool dense = a.row_ids == nullptr;
  w.ranks = reinterpret_cast<Key*>(take(dense ? 0 : list));
  w.firsts = reinterpret_cast<Key*>(take(dense ? table_list_bytes(a) : list));
  const size_t compute_bytes = a.scalar == core::Scalar::float64 ? sizeof(double) : sizeof(float);
  const size_t spans =
      static_cast<size_t>(divide_up(a.count, span) * a.embedding_dim) * compute_bytes;
  w.heads = take(spans);
  w.tails = take(spans);
  w.sort = base + w.bytes;
  w.sort_bytes = static_cast<size_t>(a.workspace_bytes) - w.bytes;
  return w;
}

// Padding and ids outside the table get the key num_embeddings, which sorts last and is omitted
// from every sum.
__global__ void key_kernel(BackwardArguments a, Workspace w) {
  const int64_t place = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (place >= a.count) return;
  const int64_t id = read(a.ids, place);
  const uint64_t row = static_cast<uint64_t>(id) + static_cast<uint64_t>(a.first_row);
  const bool kept = row < static_cast<uint64_t>(a.num_embeddings) && id != a.padding_idx;
  w.unsorted_keys[place] = static_cast<Key>(kept ? row : static_cast<uint64_t>(a.num_embeddings));
  w.unsorted_places[place] = static_cast<Place>(place);
}

__device__ bool is_head(const BackwardArguments& a, const Key* keys, int64_t entry) {
  return keys[entry] < a.num_embeddings && (entry == 0 || keys[entry - 1] != keys[entry]);
}

__global__ void head_kernel(BackwardArguments a, Workspace w) {
  const int64_t entry = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (entry < a.count) w.unsorted_keys[entry] = is_head(a, w.keys, entry);
}

__global__ void first_kernel(BackwardArguments a, Workspace w) {
  const int64_t entry = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (entry < a.count && is_head(a, w.keys, entry)) {
    w.firsts[w.keys[entry]] = static_cast<Key>(entry + 1);
  }
}

__global__ void row_id_kernel(BackwardArguments a, Workspace w) {
  const int64_t entry = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (entry >= a.count) return;
  if (is_head(a, w.keys, entry)) {
    a.row_ids[w.ranks[entry] - 1] = w.keys[entry];
    w.firsts[w.ranks[entry] - 1] = static_cast<Key>(entry + 1);
  }
  if (entry == a.count - 1) *a.groups = w.ranks[entry];
}

/// The row of the output that an entry belongs to.
__device__ int64_t row_of(const BackwardArguments& a, const Workspace& w, int64_t entry) {
  return a.row_ids != nullptr ? int64_t{w.ranks[entry]} - 1 : int64_t{w.keys[entry]};
}

// The end of the group that begins at `begin` and is known to contain [begin, known).
__device__ int64_t group_end(const Key* keys, int64_t count, int64_t begin, int64_t known) {
  int64_t low = known, high = count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (keys[middle] == keys[begin]) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

/// The factor of a group's sum.
template <typename T>
__device__ Compute<T> factor_of(const BackwardArguments& a, int64_t group_size) {
  const bool divides = a.scale_grad_by_freq && group_size > 0;
  return static_cast<Compute<T>>(divides ? a.scale / static_cast<double>(group_size) : a.scale);
}

/// Whether the group that begins at `begin` has more than one span.
__device__ bool is_long(const BackwardArguments& a, const Key* keys, int64_t begin) {
  return begin + span < a.count && keys[begin + span] == keys[begin];
}

/// The end of the run of entries with the key of entry `begin`, at most `span` of them. The whole
/// warp calls it with the same `begin`.
__device__ int64_t span_end(const BackwardArguments& a, const Key* keys, int64_t begin) {
  const Key key = keys[begin];
  const int64_t limit = begin + span < a.count ? begin + span : a.count;
  for (int64_t first = begin; first < limit; first += warp_size) {
    const int64_t entry = first + threadIdx.x % warp_size;
    const unsigned others = __ballot_sync(whole_warp, entry >= limit || keys[entry] != key);
    if (others != 0) return first + __ffs(others) - 1;
  }
  return limit;
}

/// The kind of a long group's span.
enum class Span { first, later };

/// The entry in a window of `span` entries at which such a span begins; there is at most one. -1:
/// none. The whole warp calls it.
__device__ int64_t find_span(const BackwardArguments& a, const Workspace& w, int64_t window,
                             Span which) {
  for (int64_t first = window * span; first < (window + 1) * span; first += warp_size) {
    const int64_t entry = first + threadIdx.x % warp_size;
    bool begins = false;
    if (entry < a.count && w.keys[entry] < a.num_embeddings) {
      const int64_t group = int64_t{w.firsts[row_of(a, w, entry)]} - 1;
      begins = (entry - group) % span == 0 && (entry == group) == (which == Span::first) &&
               is_long(a, w.keys, group);
    }
    const unsigned found = __ballot_sync(whole_warp, begins);
    if (found != 0) return first + __ffs(found) - 1;
  }
  return -1;
}

/// The rows of `gradient` for a span of entries, two per lane of the calling warp.
template <typename T>
struct SpanRows {
  static constexpr int kept = span / warp_size;
  const BackwardArguments& a;
  Place rows[kept] = {};
  Compute<T> factors[kept] = {};

  __device__ SpanRows(const BackwardArguments& arguments, const Place* places, int64_t begin)
      : a(arguments) {
    const auto* given = static_cast<const Compute<T>*>(a.sources.factors);
#pragma unroll
    for (int i = 0; i < kept; ++i) {
      const int64_t entry = begin + i * warp_size + threadIdx.x % warp_size;
      if (entry >= a.count) continue;
      const Place place = places[entry];
      rows[i] = a.sources.rows != nullptr ? static_cast<Place>(a.sources.rows[place]) : place;
      factors[i] = given != nullptr ? given[place] : Compute<T>{1};
    }
  }

  /// Row `number` of the span and its factor. The whole warp calls it with the same number.
  __device__ const T* row(int number) const {
    const Place low = __shfl_sync(whole_warp, rows[0], number % warp_size);
    const Place high = __shfl_sync(whole_warp, rows[kept - 1], number % warp_size);
    return static_cast<const T*>(a.gradient) +
           int64_t{number < warp_size ? low : high} * a.embedding_dim;
  }
  __device__ Compute<T> factor(int number) const {
    if (a.sources.factors == nullptr) return 1;
    const Compute<T> low = __shfl_sync(whole_warp, factors[0], number % warp_size);
    const Compute<T> high = __shfl_sync(whole_warp, factors[kept - 1], number % warp_size);
    return number < warp_size ? low : high;
  }
};

/// Adds the first `count` rows of a span in order, `vectors` vectors per lane, starting at
/// `column`. Loads several rows before it adds the first.
template <int in_flight, typename T, int width, int vectors>
__device__ void add_rows(const SpanRows<T>& span_rows, int count, int64_t column,
                         Compute<T> (&total)[vectors][width]) {
  for (int first = 0; first < count; first += in_flight) {
    Vector<T, width> loaded[in_flight][vectors] = {};
    Compute<T> factors[in_flight] = {};
#pragma unroll
    for (int i = 0; i < in_flight; ++i) {
      if (first + i >= count) continue;
      const T* row = span_rows.row(first + i);
      factors[i] = span_rows.factor(first + i);
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
        const int64_t place = column + v * warp_size * width;
        if (place >= span_rows.a.embedding_dim) continue;
        loaded[i][v] = *reinterpret_cast<const Vector<T, width>*>(row + place);
      }
    }
#pragma unroll
    for (int i = 0; i < in_flight; ++i) {
      if (first + i >= count) continue;
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
        Compute<T> values[width];
        core::load_all(loaded[i][v].values, values);
#pragma unroll
        for (int k = 0; k < width; ++k) total[v][k] += values[k] * factors[i];
      }
    }
  }
}

/// Small blocks, so that one with long sums occupies few of a multiprocessor's threads.
constexpr int row_threads = 2 * warp_size;

/// Vectors per lane. With more than 16 elements, the rows in flight would take half of the
/// registers.
template <int width>
constexpr int row_vectors = std::min(4, 16 / width);

// `shares` items per row of the output: zeros, or the sum of a group of one span.
template <typename T, int width>
__global__ void __launch_bounds__(row_threads)
    row_kernel(BackwardArguments a, Workspace w, int64_t shares) {
  constexpr int vectors = row_vectors<width>;
  const Item item = item_of_lane<width>(shares, vectors);
  if (item.row >= a.out_rows) return;
  const int64_t begin = int64_t{w.firsts[item.row]} - 1;
  if (begin >= 0 && is_long(a, w.keys, begin)) return;  // finish_kernel writes this row

  const SpanRows<T> rows(a, w.places, begin < 0 ? a.count : begin);
  const int count = begin < 0 ? 0 : static_cast<int>(span_end(a, w.keys, begin) - begin);
  const Compute<T> factor = factor_of<T>(a, count);
  T* out = static_cast<T*>(a.out) + item.row * a.embedding_dim;
  const int64_t lane_column = threadIdx.x % warp_size * width, step = shares * vectors * warp_size;
  for (int64_t first = item.column - lane_column; first < a.embedding_dim; first += step * width) {
    Compute<T> total[vectors][width] = {};
    add_rows<2>(rows, count, first + lane_column, total);
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      const int64_t column = first + lane_column + i * warp_size * width;
      if (column >= a.embedding_dim) continue;
      Vector<T, width> result = {};
#pragma unroll
      for (int j = 0; j < width && begin >= 0; ++j) store(total[i][j] * factor, &result.values[j]);
      core::write_vector<T, width>(result, out + column);
    }
  }
}

// Two items per window of entries: the first span of a long group, and a later span of another.
template <typename T, int width>
__global__ void __launch_bounds__(threads)
    span_kernel(BackwardArguments a, Workspace w, int64_t pieces) {
  const Item item = item_of_lane<width>(pieces, 1);
  const int64_t window = item.row / 2;
  const Span which = item.row % 2 == 0 ? Span::first : Span::later;
  const int64_t begin = find_span(a, w, window, which);
  if (begin < 0) return;
  const SpanRows<T> rows(a, w.places, begin);
  const int count = static_cast<int>(span_end(a, w.keys, begin) - begin);
  Compute<T> total[1][width] = {};
  add_rows<8>(rows, count, item.column, total);
  if (item.column >= a.embedding_dim) return;
  auto* sums = static_cast<Compute<T>*>(which == Span::first ? w.heads : w.tails);
#pragma unroll
  for (int i = 0; i < width; ++i) {
    sums[window * a.embedding_dim + item.column + i] = total[0][i];
  }
}

// One item per window of entries, in which at most one long group begins.
template <typename T, int width>
__global__ void __launch_bounds__(threads)
    finish_kernel(BackwardArguments a, Workspace w, int64_t pieces) {
  const Item item = item_of_lane<width>(pieces, 1);
  const int64_t column = item.column, begin = find_span(a, w, item.row, Span::first);
  if (begin < 0 || column >= a.embedding_dim) return;

  Compute<T> total[width] = {};
  const auto add = [&](const void* sums, int64_t entry) {
    const auto* row =
        static_cast<const Compute<T>*>(sums) + entry / span * a.embedding_dim + column;
#pragma unroll
    for (int i = 0; i < width; ++i) total[i] += row[i];
  };
  const int64_t end = group_end(w.keys, a.count, begin, begin + span);
  add(w.heads, begin);
#pragma unroll 8
  for (int64_t entry = begin + span; entry < end; entry += span) add(w.tails, entry);
  const Compute<T> factor = factor_of<T>(a, end - begin);
  Vector<T, width> result;
#pragma unroll
  for (int i = 0; i < width; ++i) store(total[i] * factor, &result.values[i]);
  T* out = static_cast<T*>(a.out) + row_of(a, w, begin) * a.embedding_dim;
  core::write_vector<T, width>(result, out + column);
}

/// The minimum number of warps that keeps a multiprocessor busy.
constexpr int64_t busy_warps = 128;

template <typename T, int width>
void launch_sums(const BackwardArguments& a, const Workspace& w, cudaStream_t stream) {
  const int64_t rows = a.out_rows;
  // A warp processes a whole row, so that it finds the row's entries only once, unless there are
  // few rows.
  const int64_t row_pieces = divide_up(a.embedding_dim, row_vectors<width> * warp_size * width);
  const int64_t shares =
      std::min(row_pieces, divide_up(busy_warps * core::multiprocessors(), rows));
  core::launch(row_kernel<T, width>, divide_up(rows * shares, row_threads / warp_size), row_threads,
               stream, a, w, shares);
  if (a.count <= span) return;
  const int64_t windows = divide_up(a.count, span);
  const int64_t pieces = divide_up(a.embedding_dim, warp_size * width);
  core::launch(span_kernel<T, width>, blocks_for(2 * windows * pieces), threads, stream, a, w,
               pieces);
  core::launch(finish_kernel<T, width>, blocks_for(windows * pieces), threads, stream, a, w,
               pieces);
}

/// Sorts rows by id, stably, so that sums have a fixed order. CUB reports and clears errors of
/// earlier launches, so the status is read after each step.
const char* sort(const BackwardArguments& a, Workspace& w, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(divide_up(a.count, threads));
  if (const char* error = core::checked_launch(key_kernel, blocks, threads, 0, stream, a, w)) {
    return error;
  }
  return core::text_of(cub::DeviceRadixSort::SortPairs(w.sort, w.sort_bytes, w.unsorted_keys,
                                                       w.keys, w.unsorted_places, w.places, a.count,
                                                       0, key_bits(a.num_embeddings), stream));
}

/// Dense form: finds the first entry of each row of the table.
const char* find_first_entries(const BackwardArguments& a, Workspace& w, cudaStream_t stream) {
  const cudaError_t cleared = cudaMemsetAsync(w.firsts, 0, table_list_bytes(a), stream);
  if (cleared != cudaSuccess) return core::text_of(cleared);
  const auto blocks = static_cast<unsigned>(divide_up(a.count, threads));
  return core::checked_launch(first_kernel, blocks, threads, 0, stream, a, w);
}

/// Rows form: computes ranks and the id of each row.
const char* rank_rows(const BackwardArguments& a, Workspace& w, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(divide_up(a.count, threads));
  if (const char* error = core::checked_launch(head_kernel, blocks, threads, 0, stream, a, w)) {
    return error;
  }
  const cudaError_t summed = cub::DeviceScan::InclusiveSum(w.sort, w.sort_bytes, w.unsorted_keys,
                                                           w.ranks, a.count, stream);
  if (summed != cudaSuccess) return core::text_of(summed);
  return core::checked_launch(row_id_kernel, blocks, threads, 0, stream, a, w);
}

}  // namespace

const char* gather_cuda(const GatherArguments& arguments, core::CudaStream stream) {
  if (arguments.count == 0 || arguments.embedding_dim == 0) return nullptr;
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool vectors =
        core::vectorizable<T>(arguments.weight, arguments.embedding_dim, arguments.weight_stride) &&
        core::vectorizable<T>(arguments.out, arguments.embedding_dim, arguments.embedding_dim);
    if (vectors) {
      launch_gather<T, core::vector_width<T>>(arguments, stream);
    } else {
      launch_gather<T, 1>(arguments, stream);
    }
  });
  return core::launch_error();
}

int64_t backward_workspace_cuda(const BackwardArguments& arguments) {
  return static_cast<int64_t>(lay_out(arguments).bytes + temporary_bytes(arguments));
}

const char* sort_cuda(const BackwardArguments& arguments, core::CudaStream stream) {
  if (arguments.count == 0 || arguments.num_embeddings == 0) return nullptr;
  Workspace workspace = lay_out(arguments);
  if (const char* error = sort(arguments, workspace, stream)) return error;
  const auto list = arguments.row_ids == nullptr ? find_first_entries : rank_rows;
  return list(arguments, workspace, stream);
}

const char* sum_cuda(const BackwardArguments& arguments, core::CudaStream stream) {
  if (arguments.count == 0 || arguments.out_rows == 0 || arguments.embedding_dim == 0) {
    return nullptr;
  }
  const Workspace workspace = lay_out(arguments);
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t dim = arguments.embedding_dim;
    const bool vectors = core::vectorizable<T>(arguments.gradient, dim, dim) &&
                         core::vectorizable<T>(arguments.out, dim, dim);
    if (vectors) {
      launch_sums<T, core::vector_width<T>>(arguments, workspace, stream);
    } else {
      launch_sums<T, 1>(arguments, workspace, stream);
    }
  });
  return core::launch_error();
}

}  // namespace posembed::token
