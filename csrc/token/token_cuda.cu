// Gather: a warp copies four vectors of up to 16 bytes per lane at a time. Backward: ids are
// grouped by counters, or sorted if there are many; then, in one kernel, a warp sums a span of at
// most 64 rows of one id. If an id has several spans, the warp that finishes last adds their sums.
// Every row is written once, zero or not, and every sum has a fixed order, so results are
// deterministic.
#include <cub/device/device_radix_sort.cuh>

#include "core/block_reduce.h"
#include "core/device_vector.h"
#include "token/token.h"

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

constexpr unsigned full_mask = 0xffffffffu;
constexpr int gather_vectors = 4;  // per lane

/// What a warp copies: a piece of a wide row, or several narrow rows.
struct WarpLayout {
  int64_t pieces;    // per row
  int vectors_log2;  // per lane and piece; a lane's other vectors belong to other rows
  int lanes_log2;    // per row
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

template <typename T, int width, bool has_holes>
__global__ void __launch_bounds__(threads) gather_kernel(GatherArguments a, WarpLayout layout) {
  const int lane = threadIdx.x % warp_size;
  const int64_t item = int64_t{blockIdx.x} * core::warps + threadIdx.x / warp_size;
  const int64_t row = layout.pieces == 1 ? item : item / layout.pieces;
  const int64_t piece = item - row * layout.pieces;
  const int64_t first = row * rows_of_warp(layout) + (lane >> layout.lanes_log2);
  const int first_vector = lane & ((1 << layout.lanes_log2) - 1);
  const auto index_of = [&](int i) {
    return first + (int64_t{i >> layout.vectors_log2} << (5 - layout.lanes_log2));
  };
  const auto column_of = [&](int i) {
    const int vector = (i & ((1 << layout.vectors_log2) - 1)) * warp_size + first_vector;
    return (piece * gather_vectors * warp_size + vector) * width;
  };
  int64_t ids[gather_vectors];
#pragma unroll
  for (int i = 0; i < gather_vectors; ++i) {
    if (index_of(i) < a.count) ids[i] = read(a.ids, index_of(i));
  }
  Vector<T, width> vectors[gather_vectors] = {};
  bool valid[gather_vectors];
  const auto is_hole = [&](int i) { return has_holes && ids[i] == hole; };
#pragma unroll
  for (int i = 0; i < gather_vectors; ++i) {
    valid[i] = false;
    const int64_t index = index_of(i), column = column_of(i);
    if (index >= a.count || column >= a.embedding_dim) continue;
    const auto from = static_cast<uint64_t>(ids[i]) + static_cast<uint64_t>(a.first_row);
    valid[i] = from < static_cast<uint64_t>(a.rows);
    if (valid[i]) {
      const T* data =
          static_cast<const T*>(a.weight) + static_cast<int64_t>(from) * a.weight_stride;
      vectors[i] = *reinterpret_cast<const Vector<T, width>*>(data + column);
    } else if (column == 0 && !is_hole(i)) {
      record_error(a.error, a.kind, ids[i], index, a.rows - a.first_row);
    }
  }
  const auto scale = static_cast<Compute<T>>(a.scale);
#pragma unroll
  for (int i = 0; i < gather_vectors; ++i) {
    const int64_t index = index_of(i), column = column_of(i);
    if (index >= a.count || column >= a.embedding_dim || is_hole(i)) continue;
    if (valid[i] && scale != 1) {
#pragma unroll
      for (T& value : vectors[i].values) store(load(value) * scale, &value);
    }
    T* to = static_cast<T*>(a.out) + index * a.embedding_dim;
    core::write_vector<T, width>(vectors[i], to + column);
  }
}

template <typename T, int width>
void launch_gather(const GatherArguments& a, cudaStream_t stream) {
  const WarpLayout layout = warp_layout(a.embedding_dim, width);
  const int64_t items = divide_up(a.count, rows_of_warp(layout)) * layout.pieces;
  const auto kernel = a.has_holes ? gather_kernel<T, width, true> : gather_kernel<T, width, false>;
  core::launch(kernel, blocks_for(items), threads, stream, a, layout);
}

// ---- backward ----

using Key = uint32_t;
using IdIndex = uint32_t;

struct Workspace {
  Key *unsorted_keys, *keys;
  IdIndex *unsorted_indices, *indices;  // grouped: unsorted_indices are slots in the key's list
  Key* ranks;                           // rows form: number of groups up to each entry
  Key* tile_groups;                     // rows form: number of groups that begin in each tile
  void *heads, *tails;  // for each window of entries, sums of spans of long groups: first, later
  uint32_t* tickets;    // for each window, by vectors of columns: spans summed of its long group
  int64_t window_tickets;
  // Grouped, for each key: number of entries, first entry, rank of its row. Rows form: a bit for
  // each row with entries. One ticket for a block.
  uint32_t *counts, *firsts, *row_ranks, *touched, *block_ticket;
  size_t zeros;       // bytes from tickets on that are zero before
  void* sort;         // temporary memory of CUB
  size_t sort_bytes;  // the rest of the workspace
  size_t bytes;       // without them
};

/// Ids are grouped up to this number of ids and of rows. Each row has counters: 4 MiB of them stay
/// in the L2 cache of every GPU.
constexpr int64_t max_grouped_ids = int64_t{1} << 17, max_grouped_rows = int64_t{1} << 20;

bool can_group(const BackwardArguments& a) {
  return a.count <= max_grouped_ids && a.num_embeddings <= max_grouped_rows;
}

/// A bit for each of `count` items, in words.
POSEMBED_INLINE int64_t words_of(int64_t count) { return (count + warp_size - 1) / warp_size; }

int key_bits(int64_t num_embeddings) {
  int bits = 1;
  while (num_embeddings >> bits > 0) ++bits;  // the key num_embeddings marks omitted ids
  return bits;
}

size_t temporary_bytes(const BackwardArguments& a) {
  size_t sort = 0;
  cub::DeviceRadixSort::SortPairs(nullptr, sort, static_cast<const Key*>(nullptr),
                                  static_cast<Key*>(nullptr), static_cast<const IdIndex*>(nullptr),
                                  static_cast<IdIndex*>(nullptr), a.count, 0,
                                  key_bits(a.num_embeddings));
  return sort;
}

/// Calls function(Tag<T>, width) with constants for the widest vectors in which rows of the
/// gradient and of the result can be read and written.
template <typename Function>
void visit_vectors(const BackwardArguments& a, const Function& function) {
  core::visit_scalar(a.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t dim = a.embedding_dim;
    core::visit_width<T>(
        std::min(core::width_of<T>(a.gradient, dim, dim), core::width_of<T>(a.out, dim, dim)),
        [&](auto width) { function(tag, width); });
  });
}

/// The pieces of a row that have a vector for each lane of a warp.
int64_t pieces_of(const BackwardArguments& a) {
  int64_t pieces = 0;
  visit_vectors(a, [&](auto, auto width) {
    pieces = divide_up(a.embedding_dim, warp_size * int64_t{width});
  });
  return pieces;
}

/// Windows of `span` entries.
int64_t windows_of(const BackwardArguments& a) { return divide_up(a.count, span); }

Workspace lay_out(const BackwardArguments& a, bool grouped) {
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
  w.unsorted_indices = reinterpret_cast<IdIndex*>(take(list));
  w.indices = reinterpret_cast<IdIndex*>(take(list));
  const bool dense = a.row_ids == nullptr;
  w.ranks = reinterpret_cast<Key*>(take(dense ? 0 : list));
  w.tile_groups = w.unsorted_keys;  // no longer needed
  const size_t compute_bytes = a.scalar == core::Scalar::float64 ? sizeof(double) : sizeof(float);
  const auto windows = static_cast<size_t>(windows_of(a));
  const size_t spans = windows * static_cast<size_t>(a.embedding_dim) * compute_bytes;
  w.heads = take(spans);
  w.tails = take(spans);
  w.window_tickets = pieces_of(a) * warp_size;
  const auto take_words = [&](int64_t count) {
    return reinterpret_cast<uint32_t*>(take(static_cast<size_t>(count) * sizeof(uint32_t)));
  };
  const int64_t keys = grouped ? a.num_embeddings + 1 : 0;
  w.firsts = take_words(keys);
  w.row_ranks = take_words(dense ? 0 : keys);
  w.tickets = take_words(a.count > span ? windows_of(a) * w.window_tickets : 0);
  if (grouped) {
    w.counts = take_words(keys);
    w.touched = take_words(dense ? 0 : words_of(keys));
    w.block_ticket = take_words(1);
  }
  w.zeros = static_cast<size_t>(base + w.bytes - reinterpret_cast<char*>(w.tickets));
  w.sort = base + w.bytes;
  w.sort_bytes = static_cast<size_t>(a.workspace_bytes) - w.bytes;
  return w;
}

/// The row of an id. Padding and ids outside the table get the key num_embeddings, which sorts last
/// and is omitted from every sum.
__device__ Key key_of(const BackwardArguments& a, int64_t index) {
  const int64_t id = read(a.ids, index);
  const uint64_t row = static_cast<uint64_t>(id) + static_cast<uint64_t>(a.first_row);
  const bool kept = row < static_cast<uint64_t>(a.num_embeddings) && id != a.padding_idx;
  return static_cast<Key>(kept ? row : static_cast<uint64_t>(a.num_embeddings));
}

__global__ void key_kernel(BackwardArguments a, Workspace w) {
  const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (index >= a.count) return;
  w.unsorted_keys[index] = key_of(a, index);
  w.unsorted_indices[index] = static_cast<IdIndex>(index);
}

__device__ bool is_head(const BackwardArguments& a, const Key* keys, int64_t entry) {
  return keys[entry] < a.num_embeddings && (entry == 0 || keys[entry - 1] != keys[entry]);
}

/// A block computes the ranks of a tile of entries.
constexpr int rank_threads = 1024;
constexpr int64_t tile_size = 4 * rank_threads;

int64_t tiles_of(const BackwardArguments& a) { return divide_up(a.count, tile_size); }

/// The maximum number of tiles whose blocks count the groups of earlier tiles themselves.
constexpr int64_t max_recounted_tiles = 4;

/// Counts the groups that begin among entries [begin, end). The whole block calls it.
__device__ uint32_t count_groups(const BackwardArguments& a, const Key* keys, int64_t begin,
                                 int64_t end) {
  uint32_t groups = 0;
  for (int64_t i = begin + threadIdx.x; i < end; i += rank_threads) groups += is_head(a, keys, i);
  return core::over_block(groups, core::Add{});
}

__global__ void __launch_bounds__(rank_threads) count_kernel(BackwardArguments a, Workspace w) {
  const int64_t first = blockIdx.x * tile_size;
  const uint32_t groups = count_groups(a, w.keys, first, min(first + tile_size, a.count));
  if (threadIdx.x == 0) w.tile_groups[blockIdx.x] = groups;
}

/// The sum of `total` and the values of all threads before this one in its block of whole warps.
/// Adds the values of all threads to `total`. The whole block calls it.
__device__ uint32_t sum_before(uint32_t value, uint32_t* total) {
  __shared__ uint32_t warp_sums[1024 / warp_size];
  const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
  uint32_t end = value;
#pragma unroll
  for (int step = 1; step < warp_size; step *= 2) {
    const uint32_t other = __shfl_sync(full_mask, end, (lane - step) & (warp_size - 1));
    end += lane >= step ? other : 0;
  }
  if (lane == warp_size - 1) warp_sums[warp] = end;
  __syncthreads();
  uint32_t before = *total + end - value;
  for (int i = 0; i < static_cast<int>(blockDim.x) / warp_size; ++i) {
    before += i < warp ? warp_sums[i] : 0;
    *total += warp_sums[i];
  }
  __syncthreads();  // before the next sums
  return before;
}

/// Writes ranks and the id of each row.
__global__ void __launch_bounds__(rank_threads)
    rank_kernel(BackwardArguments a, Workspace w, bool counted) {
  const int64_t first = blockIdx.x * tile_size, end = min(first + tile_size, a.count);
  uint32_t before = 0;
  if (counted) {
    for (unsigned i = threadIdx.x; i < blockIdx.x; i += rank_threads) before += w.tile_groups[i];
    before = core::over_block(before, core::Add{});
  } else {
    before = count_groups(a, w.keys, 0, first);
  }
  for (int64_t row = first; row < end; row += rank_threads) {
    const int64_t entry = row + threadIdx.x;
    const bool head = entry < end && is_head(a, w.keys, entry);
    const uint32_t rank = sum_before(head, &before) + head;
    if (entry < end) w.ranks[entry] = rank;
    if (head) a.row_ids[rank - 1] = w.keys[entry];
    if (entry == a.count - 1) *a.groups = rank;
  }
}

// ---- grouping without a sort ----

constexpr int group_threads = 1024;
constexpr int order_threads = 512;
constexpr int ids_in_flight = 4;  // of a thread

/// Reads what another multiprocessor has written.
__device__ inline uint32_t again(const uint32_t* word) {
  return *static_cast<const volatile uint32_t*>(word);
}

/// Counts the calling lane's key and returns how many were counted before. Lanes with the same key
/// take neighbouring slots with one atomic.
__device__ uint32_t take_slot(uint32_t* counts, Key key, bool counts_key) {
  const unsigned same = __match_any_sync(full_mask, counts_key ? static_cast<int>(key) : -1);
  const int lane = threadIdx.x % warp_size, leader = __ffs(same) - 1;
  uint32_t slot = 0;
  if (counts_key && lane == leader) slot = atomicAdd(counts + key, uint32_t(__popc(same)));
  return __shfl_sync(full_mask, slot, leader) + __popc(same & ((1u << lane) - 1));
}

/// Calls visit(number, bit) for the bits that are set in a number of words, which are numbered from
/// `number` on. Returns the number of the next. The whole block calls it.
template <typename Visit>
__device__ uint32_t number_bits(const uint32_t* words, int64_t count, uint32_t number,
                                const Visit& visit) {
  for (int64_t first = 0; first < count; first += blockDim.x) {
    const int64_t word = first + threadIdx.x;
    uint32_t bits = word < count ? again(words + word) : 0;
    uint32_t next = sum_before(__popc(bits), &number);
    for (; bits != 0; bits &= bits - 1) visit(next++, word * warp_size + __ffs(bits) - 1);
  }
  return number;
}

/// Calls visit(index, keys, slots) for the ids that the calling thread has in flight, of which the
/// first has that index and the others follow group_threads apart. A block shares all ids.
template <typename Visit>
__device__ void for_ids(const BackwardArguments& a, const Workspace& w, const Visit& visit) {
  for (int64_t first = 0; first < a.count; first += ids_in_flight * group_threads) {
    Key keys[ids_in_flight];
    uint32_t slots[ids_in_flight];
#pragma unroll
    for (int i = 0; i < ids_in_flight; ++i) {
      const int64_t index = first + i * group_threads + threadIdx.x;
      const bool exists = index < a.count;
      keys[i] = exists ? again(w.unsorted_keys + index) : 0;
      slots[i] = exists ? again(w.unsorted_indices + index) : 0;
    }
    visit(first + threadIdx.x, keys, slots);
  }
}

/// Gives each key a list of entries, in any order, and fills the lists by slots. One block calls it
/// when all ids are counted.
__device__ void fill_lists(const BackwardArguments& a, const Workspace& w) {
  const bool dense = a.row_ids == nullptr;
  if (!dense) {
    const uint32_t rows =
        number_bits(w.touched, words_of(a.num_embeddings), 0, [&](uint32_t number, int64_t row) {
          a.row_ids[number] = row;
          w.row_ranks[row] = number + 1;
        });
    if (threadIdx.x == 0) *a.groups = rows;
  }
  uint32_t next = 0;
  for_ids(a, w, [&](int64_t first, const Key* keys, const uint32_t* slots) {
    uint32_t lengths[ids_in_flight], total = 0;
#pragma unroll
    for (int i = 0; i < ids_in_flight; ++i) {
      const bool begins = first + i * group_threads < a.count && slots[i] == 0;
      lengths[i] = begins ? again(w.counts + keys[i]) : 0;
      total += lengths[i];
    }
    uint32_t begin = sum_before(total, &next);
#pragma unroll
    for (int i = 0; i < ids_in_flight; ++i) {
      if (lengths[i] > 0) w.firsts[keys[i]] = begin;
      begin += lengths[i];
    }
  });
  __syncthreads();
  for_ids(a, w, [&](int64_t first, const Key* keys, const uint32_t* slots) {
#pragma unroll
    for (int i = 0; i < ids_in_flight; ++i) {
      const int64_t index = first + i * group_threads;
      if (index >= a.count) continue;
      const uint32_t entry = w.firsts[keys[i]] + slots[i];
      w.keys[entry] = keys[i];
      w.indices[entry] = static_cast<IdIndex>(index);
      if (!dense && keys[i] < a.num_embeddings) w.ranks[entry] = w.row_ranks[keys[i]];
    }
  });
}

/// Counts ids by key; the block that finishes last fills the lists.
__global__ void __launch_bounds__(group_threads) group_kernel(BackwardArguments a, Workspace w) {
  __shared__ bool is_last;
  const int64_t index = int64_t{blockIdx.x} * group_threads + threadIdx.x;
  const Key key = index < a.count ? key_of(a, index) : 0;
  const uint32_t slot = take_slot(w.counts, key, index < a.count);
  if (index < a.count) {
    w.unsorted_keys[index] = key;
    w.unsorted_indices[index] = slot;
    const bool touches = a.row_ids != nullptr && slot == 0 && key < a.num_embeddings;
    if (touches) atomicAdd(w.touched + key / warp_size, 1u << key % warp_size);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(w.block_ticket, 1u) + 1 == gridDim.x;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  fill_lists(a, w);
}

/// Puts the entries of each list in the order of the ids. A block orders the lists that begin in a
/// window of entries: short ones by ranks, and a long one, of which there is at most one, by a bit
/// for each id.
__global__ void __launch_bounds__(order_threads) order_kernel(BackwardArguments a, Workspace w) {
  __shared__ uint32_t long_begin, long_size;
  auto* bits = reinterpret_cast<uint32_t*>(core::dynamic_shared_memory());
  const int64_t entry = int64_t{blockIdx.x} * span + threadIdx.x;
  if (threadIdx.x == 0) long_size = 0;
  __syncthreads();
  uint32_t begin = 0, size = 0, rank = 0;
  if (threadIdx.x < 2 * span && entry < a.count && w.keys[entry] < a.num_embeddings) {
    begin = w.firsts[w.keys[entry]];
    if (begin / span == blockIdx.x) size = w.counts[w.keys[entry]];
  }
  if (size > span && entry == begin) {
    long_begin = begin;
    long_size = size;
  }
  const bool ranked = size > 1 && size <= span;
  const IdIndex index = ranked ? w.indices[entry] : 0;
  for (uint32_t i = 0; ranked && i < size; ++i) rank += w.indices[begin + i] < index;
  __syncthreads();
  if (ranked) w.indices[begin + rank] = index;
  if (long_size == 0) return;
  const int64_t words = words_of(a.count);
  for (int64_t word = threadIdx.x; word < words; word += order_threads) bits[word] = 0;
  __syncthreads();
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < long_size; i += order_threads) {
    const IdIndex found = w.indices[long_begin + i];
    atomicAdd(bits + found / warp_size, 1u << found % warp_size);
  }
  __syncthreads();
  number_bits(bits, words, long_begin, [&](uint32_t number, int64_t found) {
    w.indices[number] = static_cast<IdIndex>(found);
  });
}

/// The row of the output that an entry belongs to.
__device__ int64_t row_of(const BackwardArguments& a, const Workspace& w, int64_t entry) {
  return a.row_ids != nullptr ? int64_t{w.ranks[entry]} - 1 : int64_t{w.keys[entry]};
}

/// The first of entries [low, high) whose key is not below `key`; high: none. The whole warp calls
/// it with the same arguments.
__device__ int64_t first_entry(const Key* keys, int64_t low, int64_t high, uint64_t key) {
  while (low < high) {
    const int64_t step = (high - low + warp_size - 1) / warp_size;
    const int64_t last = low + (threadIdx.x % warp_size + 1) * step - 1;  // of each lane's part
    const unsigned others = ~__ballot_sync(full_mask, last < high && keys[last] < key);
    low += (others == 0 ? warp_size : __ffs(others) - 1) * step;
    high = min(high, low + step - 1);
  }
  return high;
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
    const unsigned others = __ballot_sync(full_mask, entry >= limit || keys[entry] != key);
    if (others != 0) return first + __ffs(others) - 1;
  }
  return limit;
}

/// The rows of `gradient` for a span of entries, two per lane of the calling warp.
template <typename T>
struct SpanRows {
  static constexpr int kept = span / warp_size;
  const BackwardArguments& a;
  IdIndex rows[kept] = {};
  Compute<T> factors[kept] = {};

  __device__ SpanRows(const BackwardArguments& arguments, const IdIndex* indices, int64_t begin)
      : a(arguments) {
    const auto* source_factors = static_cast<const Compute<T>*>(a.sources.factors);
#pragma unroll
    for (int i = 0; i < kept; ++i) {
      const int64_t entry = begin + i * warp_size + threadIdx.x % warp_size;
      if (entry >= a.count) continue;
      const IdIndex index = indices[entry];
      rows[i] = a.sources.rows != nullptr ? static_cast<IdIndex>(a.sources.rows[index]) : index;
      factors[i] = source_factors != nullptr ? source_factors[index] : Compute<T>{1};
    }
  }

  /// Row `number` of the span and its factor. The whole warp calls it with the same number.
  __device__ const T* row(int number) const {
    const IdIndex low = __shfl_sync(full_mask, rows[0], number % warp_size);
    const IdIndex high = __shfl_sync(full_mask, rows[kept - 1], number % warp_size);
    return static_cast<const T*>(a.gradient) +
           int64_t{number < warp_size ? low : high} * a.embedding_dim;
  }
  __device__ Compute<T> factor(int number) const {
    if (a.sources.factors == nullptr) return 1;
    const Compute<T> low = __shfl_sync(full_mask, factors[0], number % warp_size);
    const Compute<T> high = __shfl_sync(full_mask, factors[kept - 1], number % warp_size);
    return number < warp_size ? low : high;
  }
};

/// Adds the first `count` rows in order, `vectors` vectors per lane, starting at `column`. Loads
/// several rows before it adds the first.
template <int in_flight, typename T, int width, int vectors>
__device__ void add_rows(const SpanRows<T>& rows, int count, int64_t column,
                         Compute<T> (&total)[vectors][width]) {
  for (int first = 0; first < count; first += in_flight) {
    core::DeviceWords<T, width> loaded[in_flight][vectors];
    Compute<T> factors[in_flight] = {};
#pragma unroll
    for (int i = 0; i < in_flight; ++i) {
      if (first + i >= count) continue;
      const T* row = rows.row(first + i);
      factors[i] = rows.factor(first + i);
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
        const int64_t offset = column + v * warp_size * width;
        if (offset < rows.a.embedding_dim) loaded[i][v].read(row + offset);
      }
    }
#pragma unroll
    for (int i = 0; i < in_flight; ++i) {
      if (first + i >= count) continue;
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
        Compute<T> values[width];
        loaded[i][v].load(values);
#pragma unroll
        for (int k = 0; k < width; ++k) total[v][k] += values[k] * factors[i];
      }
    }
  }
}

/// Blocks are small, so that a long sum keeps few threads of a multiprocessor from other work.
constexpr int sum_threads = 2 * warp_size;

/// Vectors per lane of a sum: at most 16 elements, because more would need too many registers for
/// the rows in flight.
template <int width>
constexpr int sum_vectors = std::min(4, 16 / width);

/// Vectors per lane of rows that are copied or zeroed.
constexpr int copy_vectors = 4;

/// The work items of sum_kernel, one per warp. First pieces of windows of entries: their warps sum
/// the spans of long groups. Then, in the dense form, blocks of the table's rows: their warps zero
/// the rows without entries. Then entries: the warp of a group's first entry sums the group.
struct Items {
  int64_t windows = 0, blocks = 0;  // items of these kinds
  int64_t window_pieces, block_shares, entry_shares;
};

/// The rows of a block: one for each bit of a word.
constexpr int block_rows = 32;

/// Item `number`: a share of a window, block or entry.
struct Share {
  int64_t index, number, count;  // index: of the window, block or entry

  __device__ Share(int64_t item, int64_t shares)
      : index(shares == 1 ? item : item / shares), number(item - index * shares), count(shares) {}
};

/// Calls visit(column) for the calling lane's first columns of a share's groups of `vectors`
/// vectors per lane.
template <int width, int vectors, typename Visit>
__device__ void for_columns(const BackwardArguments& a, const Share& share, Visit visit) {
  constexpr int group = vectors * warp_size * width;
  const int lane_column = static_cast<int>(threadIdx.x) % warp_size * width;
  for (int64_t first = share.number * group; first < a.embedding_dim;
       first += share.count * group) {
    visit(first + lane_column);
  }
}

/// Writes values * factor to one of the lane's vectors of columns.
template <typename T, int width>
__device__ void write_columns(const BackwardArguments& a, int64_t row, int64_t column,
                              const Compute<T> (&values)[width], Compute<T> factor) {
  Vector<T, width> result;
#pragma unroll
  for (int i = 0; i < width; ++i) store(values[i] * factor, &result.values[i]);
  core::write_vector<T, width>(result, static_cast<T*>(a.out) + row * a.embedding_dim + column);
}

// ---- entries ----

/// The sum of a single row. Like a longer sum, it is never -0.
template <typename T, int width>
__device__ void copy_row(const BackwardArguments& a, const Share& share, IdIndex index,
                         int64_t row) {
  using C = Compute<T>;
  const auto* factors = static_cast<const C*>(a.sources.factors);
  const C source_factor = factors != nullptr ? factors[index] : C{1}, factor = factor_of<T>(a, 1);
  const int64_t source = a.sources.rows != nullptr ? a.sources.rows[index] : index;
  const T* from = static_cast<const T*>(a.gradient) + source * a.embedding_dim;
  for_columns<width, copy_vectors>(a, share, [&](int64_t column) {
    core::DeviceWords<T, width> vectors[copy_vectors];
#pragma unroll
    for (int v = 0; v < copy_vectors; ++v) {
      const int64_t offset = column + v * warp_size * width;
      if (offset < a.embedding_dim) vectors[v].read(from + offset);
    }
#pragma unroll
    for (int v = 0; v < copy_vectors; ++v) {
      const int64_t offset = column + v * warp_size * width;
      if (offset >= a.embedding_dim) continue;
      C values[width];
      vectors[v].load(values);
#pragma unroll
      for (int i = 0; i < width; ++i) values[i] = C{0} + values[i] * source_factor;
      write_columns<T, width>(a, row, offset, values, factor);
    }
  });
}

/// Sums the group of at most one span that begins at an entry, if one does.
template <typename T, int width>
__device__ void sum_group(const BackwardArguments& a, const Workspace& w, const Share& share) {
  constexpr int vectors = sum_vectors<width>;
  const int64_t begin = share.index, last = a.count - 1;
  // Loads that do not depend on each other: most groups have one entry.
  const Key before = w.keys[begin > 0 ? begin - 1 : 0], key = w.keys[begin];
  const Key after = w.keys[begin < last ? begin + 1 : last];
  const IdIndex index = w.indices[begin];
  const int64_t row = row_of(a, w, begin);
  if (key >= a.num_embeddings || (begin > 0 && before == key)) return;
  if (begin == last || after != key) {
    copy_row<T, width>(a, share, index, row);
    return;
  }
  if (is_long(a, w.keys, begin)) return;
  const SpanRows<T> rows(a, w.indices, begin);
  const auto count = static_cast<int>(span_end(a, w.keys, begin) - begin);
  const Compute<T> factor = factor_of<T>(a, count);
  for_columns<width, vectors>(a, share, [&](int64_t column) {
    Compute<T> total[vectors][width] = {};
    add_rows<2>(rows, count, column, total);
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
      const int64_t offset = column + v * warp_size * width;
      if (offset < a.embedding_dim) write_columns<T, width>(a, row, offset, total[v], factor);
    }
  });
}

// ---- rows of the table without entries ----

/// A bit for each row of a block that has entries. The whole warp calls it.
__device__ uint32_t rows_with_entries(const BackwardArguments& a, const Workspace& w,
                                      int64_t first) {
  if (w.counts != nullptr) {
    const int64_t row = first + threadIdx.x % warp_size;
    return __ballot_sync(full_mask, row < a.num_embeddings && w.counts[row] > 0);
  }
  const Key* keys = w.keys;
  uint32_t rows = 0;
  const int64_t end = first + block_rows;
  int64_t entry = first_entry(keys, 0, a.count, static_cast<uint64_t>(first));
  while (entry < a.count) {
    const int64_t mine = min(entry + threadIdx.x % warp_size, a.count - 1);
    const Key key = keys[mine];
    rows |= key < end ? 1u << (key - static_cast<Key>(first)) : 0u;
    const Key lowest = __shfl_sync(full_mask, key, 0);
    const Key highest = __shfl_sync(full_mask, key, warp_size - 1);
    if (highest >= end) break;
    entry += warp_size;
    if (lowest == highest) entry = first_entry(keys, entry, a.count, uint64_t{highest} + 1);
  }
  return core::over_warp(rows, [](uint32_t left, uint32_t right) { return left | right; });
}

template <typename T, int width>
__device__ void write_zeros(const BackwardArguments& a, const Workspace& w, const Share& share) {
  const int64_t first = share.index * block_rows;
  const uint32_t others = rows_with_entries(a, w, first);
  for (int row = 0; row < block_rows && first + row < a.num_embeddings; ++row) {
    if (others >> row & 1) continue;
    T* out = static_cast<T*>(a.out) + (first + row) * a.embedding_dim;
    for_columns<width, copy_vectors>(a, share, [&](int64_t column) {
#pragma unroll
      for (int v = 0; v < copy_vectors; ++v) {
        const int64_t offset = column + v * warp_size * width;
        if (offset < a.embedding_dim) core::write_vector<T, width>({}, out + offset);
      }
    });
  }
}

// ---- long groups ----

/// A span of a long group, and the group's first entry.
struct LongSpan {
  int64_t begin = -1;  // -1: none
  int64_t group = -1;
};

/// The first span of the long group that begins in a window of `span` entries; there is at most
/// one. The whole warp calls it.
__device__ LongSpan first_span(const BackwardArguments& a, const Key* keys, int64_t window) {
  for (int64_t first = window * span; first < (window + 1) * span; first += warp_size) {
    const int64_t entry = first + threadIdx.x % warp_size;
    const bool begins = entry < a.count && is_head(a, keys, entry) && is_long(a, keys, entry);
    const unsigned found = __ballot_sync(full_mask, begins);
    if (found == 0) continue;
    const int64_t begin = first + __ffs(found) - 1;
    return {begin, begin};
  }
  return {};
}

/// The later span that begins in a window: it belongs to the group of the window's first entry. The
/// whole warp calls it.
__device__ LongSpan later_span(const BackwardArguments& a, const Workspace& w, int64_t window) {
  const Key* keys = w.keys;
  const int64_t first = window * span;
  if (first == 0 || keys[first] >= a.num_embeddings || keys[first - 1] != keys[first]) return {};
  const int64_t group = w.counts != nullptr ? int64_t{w.firsts[keys[first]]}
                                            : first_entry(keys, 0, first, keys[first]);
  const int64_t begin = group + (first - group + span - 1) / span * span;
  if (begin >= a.count || keys[begin] != keys[first]) return {};
  return {begin, group};
}

/// Adds the sum of a span. It was written by other multiprocessors, so the load bypasses the L1
/// cache.
template <int width, typename C>
__device__ void add_written(const C* sums, C (&total)[width]) {
#pragma unroll
  for (int i = 0; i < width; ++i) {
#if defined(__CUDA_ARCH__)
    total[i] += __ldcg(sums + i);
#else
    total[i] += sums[i];
#endif
  }
}

/// Sums a span. The lane that finishes last for its columns adds the sums of all spans in order.
template <typename T, int width>
__device__ void sum_span(const BackwardArguments& a, const Workspace& w, const LongSpan& long_span,
                         int64_t column) {
  using C = Compute<T>;
  const int64_t group = long_span.group, key = w.keys[group];
  const int64_t end = w.counts != nullptr ? group + w.counts[key]
                                          : first_entry(w.keys, long_span.begin, a.count,
                                                        static_cast<uint64_t>(key) + 1);
  const auto count = static_cast<int>(min(end - long_span.begin, span));
  C total[1][width] = {};
  add_rows<4>(SpanRows<T>(a, w.indices, long_span.begin), count, column, total);
  if (column >= a.embedding_dim) return;
  const auto sums_of = [&](int64_t begin) {
    auto* sums = static_cast<C*>(begin == group ? w.heads : w.tails);
    return sums + begin / span * a.embedding_dim + column;
  };
  core::store_values<width>(total[0], sums_of(long_span.begin));
  __threadfence();
  uint32_t* ticket = w.tickets + group / span * w.window_tickets + column / width;
  const int64_t spans = (end - group + span - 1) / span;
  if (atomicAdd(ticket, 1u) + 1 != spans) return;
  __threadfence();
#pragma unroll
  for (int i = 0; i < width; ++i) total[0][i] = 0;
#pragma unroll 4
  for (int64_t begin = group; begin < end; begin += span) add_written(sums_of(begin), total[0]);
  write_columns<T, width>(a, row_of(a, w, group), column, total[0], factor_of<T>(a, end - group));
}

template <typename T, int width>
__global__ void __launch_bounds__(sum_threads)
    sum_kernel(BackwardArguments a, Workspace w, Items items) {
  int64_t item = int64_t{blockIdx.x} * (sum_threads / warp_size) + threadIdx.x / warp_size;
  if (item < items.windows) {
    const Share window(item, items.window_pieces);
    const int64_t column = (window.number * warp_size + threadIdx.x % warp_size) * width;
    for (int which = 0; which < 2; ++which) {
      const LongSpan found =
          which == 0 ? first_span(a, w.keys, window.index) : later_span(a, w, window.index);
      if (found.begin >= 0) sum_span<T, width>(a, w, found, column);
    }
    return;
  }
  item -= items.windows;
  if (item < items.blocks) {
    write_zeros<T, width>(a, w, Share(item, items.block_shares));
    return;
  }
  const Share entry(item - items.blocks, items.entry_shares);
  if (entry.index < a.count) sum_group<T, width>(a, w, entry);
}

/// The minimum number of warps that keeps a multiprocessor busy.
constexpr int64_t busy_warps = 128;

template <typename T, int width>
void launch_sums(const BackwardArguments& a, const Workspace& w, cudaStream_t stream) {
  // A warp processes a whole row, so that it finds the row's entries only once, unless there are
  // few rows.
  const int64_t row_pieces = divide_up(a.embedding_dim, sum_vectors<width> * warp_size * width);
  const int64_t busy = busy_warps * core::multiprocessors();
  const auto shares_of = [&](int64_t rows) { return std::min(row_pieces, divide_up(busy, rows)); };
  Items items;
  items.window_pieces = divide_up(a.embedding_dim, warp_size * width);
  if (a.count > span) items.windows = windows_of(a) * items.window_pieces;
  const int64_t blocks = a.row_ids == nullptr ? divide_up(a.num_embeddings, block_rows) : 0;
  items.block_shares = shares_of(std::max<int64_t>(1, blocks));
  items.blocks = blocks * items.block_shares;
  items.entry_shares = shares_of(a.count);
  const int64_t warps = items.windows + items.blocks + a.count * items.entry_shares;
  core::launch(sum_kernel<T, width>, divide_up(warps, sum_threads / warp_size), sum_threads, stream,
               a, w, items);
}

/// Groups ids by counters, in their order.
const char* group(const BackwardArguments& a, const Workspace& w, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(divide_up(a.count, group_threads));
  if (const char* error =
          core::checked_launch(group_kernel, blocks, group_threads, 0, stream, a, w))
    return error;
  const auto windows = static_cast<unsigned>(a.count > 1 ? windows_of(a) : 0);
  const size_t bits =
      a.count > span ? static_cast<size_t>(words_of(a.count)) * sizeof(uint32_t) : 0;
  return core::checked_launch(order_kernel, windows, order_threads, bits, stream, a, w);
}

/// Sorts rows by id, stably, so that sums have a fixed order. CUB reports and clears errors of
/// earlier launches, so the status is read after each step.
const char* sort(const BackwardArguments& a, Workspace& w, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(divide_up(a.count, threads));
  if (const char* error = core::checked_launch(key_kernel, blocks, threads, 0, stream, a, w)) {
    return error;
  }
  return core::text_of(cub::DeviceRadixSort::SortPairs(
      w.sort, w.sort_bytes, w.unsorted_keys, w.keys, w.unsorted_indices, w.indices, a.count, 0,
      key_bits(a.num_embeddings), stream));
}

/// Rows form: computes ranks and the id of each row.
const char* rank_rows(const BackwardArguments& a, const Workspace& w, cudaStream_t stream) {
  const auto tiles = static_cast<unsigned>(tiles_of(a));
  const bool counted = tiles > max_recounted_tiles;
  if (counted) {
    const char* error = core::checked_launch(count_kernel, tiles, rank_threads, 0, stream, a, w);
    if (error != nullptr) return error;
  }
  return core::checked_launch(rank_kernel, tiles, rank_threads, 0, stream, a, w, counted);
}

int64_t workspace_of(const BackwardArguments& a, bool grouped) {
  return static_cast<int64_t>(lay_out(a, grouped).bytes + (grouped ? 0 : temporary_bytes(a)));
}

const char* sum_rows(const BackwardArguments& a, bool grouped, cudaStream_t stream) {
  if (a.count == 0 || a.num_embeddings == 0) return nullptr;
  Workspace w = lay_out(a, grouped);
  const cudaError_t cleared = cudaMemsetAsync(w.tickets, 0, w.zeros, stream);
  if (cleared != cudaSuccess) return core::text_of(cleared);
  if (const char* error = grouped ? group(a, w, stream) : sort(a, w, stream)) return error;
  if (a.row_ids != nullptr && !grouped) {
    if (const char* error = rank_rows(a, w, stream)) return error;
  }
  if (a.embedding_dim == 0) return nullptr;
  visit_vectors(a, [&](auto tag, auto width) {
    launch_sums<typename decltype(tag)::type, width>(a, w, stream);
  });
  return core::launch_error();
}

}  // namespace

const char* gather_cuda(const GatherArguments& arguments, core::CudaStream stream) {
  if (arguments.count == 0 || arguments.embedding_dim == 0) return nullptr;
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t dim = arguments.embedding_dim;
    core::visit_width<T>(std::min(core::width_of<T>(arguments.weight, dim, arguments.weight_stride),
                                  core::width_of<T>(arguments.out, dim, dim)),
                         [&](auto width) { launch_gather<T, width>(arguments, stream); });
  });
  return core::launch_error();
}

int64_t backward_workspace_cuda(const BackwardArguments& arguments) {
  return workspace_of(arguments, can_group(arguments));
}

const char* backward_cuda(const BackwardArguments& arguments, core::CudaStream stream) {
  return sum_rows(arguments, can_group(arguments), stream);
}

}  // namespace posembed::token
