// ALiBi on CUDA: biases are computed in registers from distances, 16 bytes of a row at a time.
// Packs begin at the 16-byte boundary at or before a row, so rows of any length take them.
//   bias, scores + bias   bias_kernel: a lane takes a pack of keys in several rows
//   softmax, gradient     row_softmax_kernel, row_softmax_backward_kernel: a block keeps a row
//   float64, longer rows, gradients of slopes, other positions: the general kernels, key by key
#include <algorithm>

#include "alibi/alibi.h"
#include "core/block_reduce.h"
#include "core/device_vector.h"
#include "core/divisor.h"

namespace posembed::alibi {
namespace {

using core::Compute;
using core::Vector;

constexpr int block_size = 256;
constexpr int64_t max_blocks = int64_t{1} << 20;

unsigned blocks_for(int64_t rows) { return static_cast<unsigned>(std::min(rows, max_blocks)); }

// ---------------------------------------------------------------------------------------- one row

/// The query of a row, beside one key at a time.
class Query {
 public:
  __device__ Query(const Distances& distances, const Row& row)
      : distances_(distances),
        batch_(row.batch),
        position_(query_position(distances, row.batch, row.query)),
        document_(document_of(distances, row.query)) {}

  __device__ int32_t distance_to(int64_t key) const {
    if (is_hidden(key)) return hidden;
    const int64_t distance = key_position(distances_, batch_, key) - position_;
    if (distance > INT32_MAX || distance < -INT32_MAX) {
      core::record_error(distances_.error, core::ErrorKind::distance, distance, key, 0);
      return hidden;
    }
    return causal_distance(distances_, static_cast<int32_t>(distance));
  }

  /// Whether the softmax gave the key a weight. Reads no position that does not decide it.
  __device__ bool sees(int64_t key) const {
    if (!distances_.apply_mask) return true;
    if (is_hidden(key)) return false;
    return !distances_.causal || key_position(distances_, batch_, key) <= position_;
  }

  /// Keys from here on are hidden and have weight 0.
  __device__ int64_t visible_end() const {
    if (!is_plain(distances_) || !distances_.causal || !distances_.apply_mask)
      return distances_.keys;
    const int64_t end = position_ + 1;
    return end < 0 ? 0 : (end < distances_.keys ? end : distances_.keys);
  }

 private:
  /// Whether a mask or the bounds of the query's document hide the key.
  __device__ bool is_hidden(int64_t key) const {
    return key < document_.begin || key >= document_.end || is_masked(distances_, batch_, key);
  }

  const Distances& distances_;
  int64_t batch_;
  int64_t position_;
  KeyRange document_;
};

/// Converts row numbers to indices without division instructions.
struct RowNumbers {
  core::Divisor<int64_t> heads, queries;

  static RowNumbers of(int64_t heads, int64_t queries) {
    return {core::Divisor<int64_t>::of(std::max<int64_t>(1, heads)),
            core::Divisor<int64_t>::of(std::max<int64_t>(1, queries))};
  }

  __device__ Row row(int64_t number) const {
    const auto query = core::divide(number, queries);
    const auto head = core::divide(query.quotient, heads);
    return {head.quotient, head.remainder, query.remainder};
  }
};

// ----------------------------------------------------------------------------------- packs of keys

/// Keys of 16 bytes as words: as elements, the compiler would take them apart and join them again.
template <typename T>
struct alignas(sizeof(T) * core::vector_width<T>) Pack {
  uint32_t words[sizeof(T) * core::vector_width<T> / sizeof(uint32_t)];
};

/// A bit for each key of a pack.
template <int width>
constexpr unsigned all_keys = (1u << width) - 1;

/// The keys of the pack at `key` that are in [begin, end).
template <int width, typename Int>
__device__ unsigned keys_between(Int key, Int begin, Int end) {
  const auto low = static_cast<int>(min(max(begin - key, Int(0)), Int(width)));
  const auto high = static_cast<int>(min(max(key + width - end, Int(0)), Int(width)));
  return all_keys<width> << low & all_keys<width> >> high;
}

/// How many elements a row begins after a 16-byte boundary.
template <typename T>
__device__ int shift_of(const T* row) {
  constexpr auto width = static_cast<uintptr_t>(core::vector_width<T>);
  return static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % width);
}

/// Whether a row has all keys of the pack at `key`. Of a row's packs, the first and last may not.
template <int width, typename Int>
__device__ bool is_whole(Int key, Int keys) {
  return key >= 0 && key + width <= keys;
}

/// The elements of a pack that are `kept`; zeros instead of the others.
template <typename T>
__device__ Pack<T> only(Pack<T> pack, unsigned kept) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // A bit becomes all bits of its element.
    pack.words[i] &= sizeof(T) == 4 ? 0u - (kept >> i & 1)
                                    : 0xffffu * ((kept >> 2 * i & 1) | (kept >> 2 * i & 2) << 15);
  }
  return pack;
}

// The rare half of what follows, in functions of their own: inlined, they would be most of a
// kernel.

template <typename T>
__device__ __attribute__((noinline)) Pack<T> load_some(const T* pack, unsigned needed) {
  Vector<T, core::vector_width<T>> loaded = {};
#pragma unroll
  for (int i = 0; i < core::vector_width<T>; ++i) {
    if ((needed >> i & 1) != 0) loaded.values[i] = pack[i];
  }
  Pack<T> words;
  memcpy(&words, &loaded, sizeof words);
  return words;
}

template <typename T, typename Int>
__device__ __attribute__((noinline)) void store_some(Pack<T> pack, T* row, Int key, Int keys) {
  Vector<T, core::vector_width<T>> stored;
  memcpy(&stored, &pack, sizeof stored);
#pragma unroll
  for (int i = 0; i < core::vector_width<T>; ++i) {
    if (key + i >= 0 && key + i < keys) row[key + i] = stored.values[i];
  }
}

/// Loads a pack of a row, of which no other keys are read than those `needed` if `aligned` is false
/// or the row lacks some.
template <typename T, typename Int>
__device__ Pack<T> load_pack(const T* row, Int key, Int keys, unsigned needed, bool aligned) {
  if (!aligned || !is_whole<core::vector_width<T>>(key, keys)) return load_some(row + key, needed);
  return *reinterpret_cast<const Pack<T>*>(row + key);
}

template <typename T, int width>
__device__ void unpack(const Pack<T>& pack, Compute<T> (&values)[width]) {
  Vector<T, width> loaded;
  memcpy(&loaded, &pack, sizeof loaded);
  core::load_all(loaded.values, values);
}

template <typename T, int width>
__device__ Pack<T> pack_of(const Compute<T> (&values)[width]) {
  Vector<T, width> stored;
#pragma unroll
  for (int i = 0; i < width; ++i) core::store(values[i], stored.values + i);
  Pack<T> pack;
  memcpy(&pack, &stored, sizeof pack);
  return pack;
}

template <typename T, typename Int>
__device__ void store_pack(const Pack<T>& pack, T* row, Int key, Int keys) {
  constexpr int width = core::vector_width<T>;
  if (is_whole<width>(key, keys)) {
    Vector<T, width> stored;
    memcpy(&stored, &pack, sizeof stored);
    core::write_vector<T, width>(stored, row + key);
  } else {
    store_some(pack, row, key, keys);
  }
}

/// Whole numbers up to this size, and their differences, are floats.
constexpr int64_t max_exact = 1 << 23;

__device__ bool is_exact(int64_t position) {
  return position <= max_exact && position >= -max_exact;
}

/// The biases of a pack, or scores * scale + biases if `adds`. The keys `seen` are at distances
/// `first`, first + 1 …; hidden scores are not used: padding may hold NaN.
template <bool adds, int width, typename C>
__device__ void apply_biases(const BiasLine<C>& line, C first, unsigned seen, C scale,
                             bool keeps_hidden, C (&values)[width]) {
  const auto show = [&](int i, C slope) {
    const C distance = first + static_cast<C>(i);
    return adds ? core::fma(slope, distance, values[i] * scale) : slope * distance;
  };
  C biased_scores[width];
  if (first > 0 || first <= C(1 - width)) {
    const C slope = first > 0 ? line.after : line.before;
#pragma unroll
    for (int i = 0; i < width; ++i) biased_scores[i] = show(i, slope);
  } else {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      biased_scores[i] = show(i, first + static_cast<C>(i) > 0 ? line.after : line.before);
    }
  }
  if (seen != all_keys<width>) {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const C hidden_score = keeps_hidden ? values[i] * scale : line.hidden;
      biased_scores[i] = (seen >> i & 1) != 0 ? biased_scores[i] : hidden_score;
    }
  }
#pragma unroll
  for (int i = 0; i < width; ++i) values[i] = biased_scores[i];
}

// ----------------------------------------------------------------------------------- bias and sums

/// A warp takes a tile: a pack of keys for each lane, in some rows of one head. What depends on
/// keys or the head alone is computed once for all its rows.
struct Tile {
  int64_t batch, head;
  int64_t begin, end;  // queries
  int64_t key;         // the first key of the lane, if rows begin at a boundary
};

struct Tiles {
  core::Divisor<int64_t> chunks, parts, heads;  // chunks of a row, parts of a head's rows
  int64_t count;
  int64_t rows;  // of a part

  /// `span`: keys of a row with those before it in its first pack. `rows`: at most so many a tile.
  static Tiles of(int64_t batch, int64_t heads, const Distances& distances, int64_t span, int width,
                  int64_t rows) {
    const auto divisor = [](int64_t value) {
      return core::Divisor<int64_t>::of(std::max<int64_t>(1, value));
    };
    const int64_t chunks = core::divide_up(span, core::warp_size * width);
    const int64_t planes = batch * heads;
    // Fewer rows where large tiles would leave multiprocessors without warps.
    const int64_t enough = int64_t{32} * core::multiprocessors();
    while (rows > 1 && planes * chunks * core::divide_up(distances.queries, rows) < enough) {
      rows /= 2;
    }
    const int64_t parts = core::divide_up(distances.queries, rows);
    return {divisor(chunks), divisor(parts), divisor(heads), planes * parts * chunks, rows};
  }

  unsigned blocks() const { return blocks_for(core::divide_up(count, warps)); }

  __device__ Tile tile(int64_t number, const Distances& distances, int width) const {
    const auto chunk = core::divide(number, chunks);
    const auto part = core::divide(chunk.quotient, parts);
    const auto head = core::divide(part.quotient, heads);
    const int64_t begin = part.remainder * rows;
    const int64_t lane = threadIdx.x % core::warp_size;
    return {head.quotient, head.remainder, begin, min(begin + rows, distances.queries),
            (chunk.remainder * core::warp_size + lane) * width};
  }

  static constexpr int warps = block_size / core::warp_size;
};

/// The keys of a lane's pack: which of them are in the row, and not masked, and the position of the
/// first. NaN: the positions of the others do not follow, or are not exact.
template <typename C, int width>
struct PackKeys {
  unsigned inside, visible;
  C position;
};

template <int width, typename C>
__device__ PackKeys<C, width> keys_at(const Distances& distances, int64_t batch, int64_t key) {
  const unsigned inside = keys_between<width>(key, int64_t{0}, distances.keys);
  if (distances.mask == nullptr && distances.key_positions.data == nullptr) {
    return {inside, inside, is_exact(key) ? static_cast<C>(key) : static_cast<C>(NAN)};
  }
  PackKeys<C, width> keys = {inside, 0, static_cast<C>(NAN)};
#pragma unroll
  for (int i = 0; i < width; ++i) {
    if ((inside >> i & 1) == 0 || is_masked(distances, batch, key + i)) continue;
    const int64_t position = key_position(distances, batch, key + i);
    const C first = is_exact(position) ? static_cast<C>(position - i) : static_cast<C>(NAN);
    keys.position = keys.visible == 0 || first == keys.position ? first : static_cast<C>(NAN);
    keys.visible |= 1u << i;
  }
  return keys;
}

/// A pack of keys whose positions do not follow one another, or are not exact.
template <typename T, bool adds>
__device__ void bias_one_by_one(const ScoreArguments& arguments, const Row& row, int64_t first) {
  using C = Compute<T>;
  const Distances& distances = arguments.distances;
  const Query query(distances, row);
  const auto line = bias_line<C>(arguments.slopes, distances, row.batch, row.head);
  const T* in = row_data<const T>(arguments.in, row);
  T* out = row_data<T>(arguments.out, row);
  const int64_t end = min(first + core::vector_width<T>, distances.keys);
  for (int64_t key = max(first, int64_t{0}); key < end; ++key) {
    const int32_t distance = query.distance_to(key);
    const C scale = static_cast<C>(arguments.scale);
    core::store(adds ? biased(line, distance, core::load(in[key]), scale) : bias(line, distance),
                out + key);
  }
}

__device__ __attribute__((noinline)) KeyRange find_document(const Distances& distances,
                                                            int64_t query) {
  return document_of(distances, query);
}

/// biases, or in * scale + biases if `adds`.
template <typename T, bool adds>
__global__ void __launch_bounds__(block_size, adds ? 3 : 4)
    bias_kernel(const __grid_constant__ ScoreArguments arguments, Tiles tiles, bool aligned) {
  using C = Compute<T>;
  constexpr int width = core::vector_width<T>;
  const Distances& distances = arguments.distances;
  const C scale = static_cast<C>(arguments.scale);
  const int64_t first_tile = int64_t{blockIdx.x} * Tiles::warps + threadIdx.x / core::warp_size;
  const int64_t step = int64_t{gridDim.x} * Tiles::warps;
  for (int64_t number = first_tile; number < tiles.count; number += step) {
    const Tile tile = tiles.tile(number, distances, width);
    Row row = {tile.batch, tile.head, tile.begin};
    const T* in = row_data<const T>(arguments.in, row);
    T* out = row_data<T>(arguments.out, row);
    const int64_t key = tile.key - shift_of(out);
    if (key >= distances.keys) continue;
    const BiasLine<C> line = bias_line<C>(arguments.slopes, distances, tile.batch, tile.head);
    const auto keys = keys_at<width, C>(distances, tile.batch, key);
    const bool keeps_hidden = adds && !distances.apply_mask;
    KeyRange document = {0, 0};
    uint32_t one_by_one = 0;  // rows of the tile, which keep the loop of the others short
    for (; row.query < tile.end; ++row.query) {
      const int64_t place = query_position(distances, tile.batch, row.query);
      const C position = is_exact(place) ? static_cast<C>(place) : static_cast<C>(NAN);
      const C first = keys.position - position;
      unsigned seen = keys.visible;
      if (distances.documents > 0) {
        // Neighbouring rows are mostly of the same document.
        const int64_t own = distances.offset + row.query;  // the key of the query's token
        if (own < document.begin || own >= document.end) {
          document = find_document(distances, row.query);
        }
        seen &= keys_between<width>(key, document.begin, document.end);
      }
      if (first == first || seen == 0) {
        if (distances.causal && !(first <= C(1 - width))) {
          seen &= first <= 0 ? all_keys<width> >> (width - 1 + static_cast<int>(first)) : 0;
        }
        C values[width] = {};
        if (adds && (seen != 0 || keeps_hidden)) {
          const auto pack = load_pack(in, key, distances.keys, keys.inside, aligned);
          unpack(pack, values);
        }
        apply_biases<adds>(line, first, seen, scale, keeps_hidden, values);
        store_pack(pack_of<T>(values), out, key, distances.keys);
      } else {
        one_by_one |= 1u << (row.query - tile.begin);
      }
      in += arguments.in.stride[2];
      out += arguments.out.stride[2];
    }
    for (; one_by_one != 0; one_by_one &= one_by_one - 1) {
      row.query = tile.begin + __ffs(one_by_one) - 1;
      bias_one_by_one<T, adds>(arguments, row, key);
    }
  }
}

// ----------------------------------------------------------------------------------------- softmax

__device__ float exponential(float x) { return exp_of_negative(x); }
__device__ double exponential(double x) { return exp(x); }

/// The maximum bytes of a row that stay in shared memory between passes; the rest is reloaded.
constexpr int64_t kept_bytes = 40 * 1024;

/// The softmax of a row of any kind, by a block. `kept`: room for the first scores.
template <typename T>
__device__ __attribute__((noinline)) void softmax_of_row(const ScoreArguments& arguments,
                                                         const Row& row, Compute<T>* kept,
                                                         int64_t kept_keys) {
  using C = Compute<T>;
  const Distances& distances = arguments.distances;
  const C scale = static_cast<C>(arguments.scale);
  const Query query(distances, row);
  const BiasLine<C> line = bias_line<C>(arguments.slopes, distances, row.batch, row.head);
  const T* in = row_data<const T>(arguments.in, row);
  T* out = row_data<T>(arguments.out, row);
  const int64_t end = query.visible_end();
  C max_score = -static_cast<C>(INFINITY), sum = 0, part = 0;
  // A thread visits the same keys in every pass, so passes need no barrier between them.
#pragma unroll 1
  for (int pass = 0; pass < 3; ++pass) {
#pragma unroll 1
    for (int64_t key = threadIdx.x; key < end; key += blockDim.x) {
      const bool is_kept = key < kept_keys;
      C value = 0;
      if (pass > 0 && is_kept) {
        value = kept[key];
      } else {
        value = biased(line, query.distance_to(key), core::load(in[key]), scale);
      }
      if (pass == 0) max_score = value > max_score ? value : max_score;
      if (pass == 1 || (pass == 2 && !is_kept)) value = exponential(value - max_score);
      if (pass == 1) part += value;
      if (pass < 2 && is_kept) kept[key] = value;
      if (pass == 2) core::store(sum == 0 ? C(0) : value * (1 / sum), out + key);
    }
    if (pass == 0) {
      max_score = core::over_block(max_score, core::Larger());
      if (max_score == -static_cast<C>(INFINITY)) max_score = 0;
    } else if (pass == 1) {
      sum = core::over_block(part, core::Add());  // 0: all keys are hidden, and weights zero
    }
  }
  for (int64_t key = end + threadIdx.x; key < distances.keys; key += blockDim.x) {
    core::store(C(0), out + key);
  }
}

template <typename T>
__global__ void __launch_bounds__(block_size)
    softmax_kernel(const __grid_constant__ ScoreArguments arguments, RowNumbers numbers,
                   int64_t kept_keys) {
  auto* kept = reinterpret_cast<Compute<T>*>(core::dynamic_shared_memory());
  const int64_t rows = arguments.batch * arguments.slopes.heads * arguments.distances.queries;
  for (int64_t number = blockIdx.x; number < rows; number += gridDim.x) {
    softmax_of_row<T>(arguments, numbers.row(number), kept, kept_keys);
  }
}

/// e^x for x <= 0, for results of type T. Those of 16 bits round away what the fast instruction
/// lacks of exp_of_negative's precision.
template <typename T>
__device__ float exponential_for(float x) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 2) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.44269504f));
    return result;
  }
#endif
  return exp_of_negative(x);
}

// ------------------------------------------------------------------------------- rows in registers

/// A block has as many warps as a row needs, so that its threads keep the row in registers. It
/// processes `rows` rows of a batch, one after another.
struct RowBlocks {
  core::Divisor<int64_t> parts, queries;  // parts: blocks of a batch
  int64_t rows, rows_of_batch;
  unsigned blocks, threads;

  /// `span`: keys of a row with those before it in its first pack.
  static RowBlocks of(int64_t batch, int64_t heads, const Distances& distances, int64_t span,
                      int keys_per_thread) {
    const auto divisor = [](int64_t value) {
      return core::Divisor<int64_t>::of(std::max<int64_t>(1, value));
    };
    const int64_t warps = core::divide_up(span, keys_per_thread * core::warp_size);
    const auto threads = static_cast<unsigned>(core::warp_size * std::max<int64_t>(1, warps));
    const int64_t rows_of_batch = heads * distances.queries;
    // Fewer rows where large blocks would leave multiprocessors without work.
    const int64_t enough = int64_t{64} * core::multiprocessors();
    const int64_t rows = std::clamp<int64_t>(batch * rows_of_batch / enough, 1, 8);
    const int64_t parts = core::divide_up(rows_of_batch, rows);
    return {divisor(parts), divisor(distances.queries),   rows,
            rows_of_batch,  core::grid_of(batch * parts), threads};
  }

  /// The first row of the block.
  __device__ Row first() const {
    const auto part = core::divide(int64_t{blockIdx.x}, parts);
    const auto query = core::divide(part.remainder * rows, queries);
    return {part.quotient, query.quotient, query.remainder};
  }

  /// The number of its rows.
  __device__ int count() const {
    const int64_t begin = core::divide(int64_t{blockIdx.x}, parts).remainder * rows;
    return static_cast<int>(min(rows, rows_of_batch - begin));
  }

  /// Calls visit(row) for each of its rows.
  template <typename Visit>
  __device__ void each_row(const Visit& visit) const {
    Row row = first();
    for (int left = count(); left > 0; --left) {
      visit(row);
      if (++row.query == queries.value) row = {row.batch, row.head + 1, 0};
    }
  }
};

/// What the queries of a block's rows see: a row after another, packs of its keys.
class BlockKeys {
 public:
  /// Reads masks and positions of the keys of a sample. Every thread must call it.
  __device__ BlockKeys(const Distances& distances, int64_t batch)
      : distances_(distances),
        bits_(reinterpret_cast<uint32_t*>(core::dynamic_shared_memory())),
        has_bits_(distances.mask != nullptr || distances.key_positions.data != nullptr) {
    if (!has_bits_) return;
    constexpr int none = 1 << 26;
    int low = none, high = -none;
    const int lane = static_cast<int>(threadIdx.x) % core::warp_size;
    for (unsigned word = threadIdx.x / core::warp_size; word < words(distances.keys);
         word += blockDim.x / core::warp_size) {
      const int64_t key = (int64_t{word} - 1) * core::warp_size + lane;
      const bool visible = key >= 0 && key < distances.keys && !is_masked(distances, batch, key);
      const uint32_t bits = __ballot_sync(0xffffffffu, visible);
      if (lane == 0) bits_[word] = bits;
      if (!visible) continue;
      const int64_t position = key_position(distances, batch, key);
      const int base = static_cast<int>(position - key);
      low = min(low, is_exact(position) ? base : -none);
      high = max(high, is_exact(position) ? base : none);
    }
    high = core::over_block(high, core::Larger());
    low = -core::over_block(-low, core::Larger());
    follow_ = low >= high;
    base_ = low == high ? low : 0;
  }

  /// Words of bits: a word before the row, because its first pack may begin there.
  static __host__ __device__ unsigned words(int64_t keys) {
    return static_cast<unsigned>((keys + 31) / 32 + 2);
  }

  /// Goes to a row; false if the positions of its keys do not follow one another, or are not exact.
  __device__ bool move_to(const Row& row) {
    const int64_t position = query_position(distances_, row.batch, row.query);
    if (!follow_ || !is_exact(position)) return false;
    KeyRange range = find_document(distances_, row.query);
    origin_ = static_cast<int>(position) - base_;
    if (distances_.causal) range.end = min(range.end, int64_t{origin_} + 1);
    begin_ = static_cast<int>(max(range.begin, int64_t{0}));
    end_ = static_cast<int>(max(min(range.end, distances_.keys), int64_t{0}));
    return true;
  }

  /// The keys of the pack at `key` that the query sees.
  template <int width>
  __device__ unsigned seen(int key) const {
    const unsigned seen = keys_between<width>(key, begin_, end_);
    if (!has_bits_ || seen == 0) return seen;
    const unsigned bit = static_cast<unsigned>(key + 32), word = bit / 32;
    return seen &
           static_cast<uint32_t>((uint64_t{bits_[word + 1]} << 32 | bits_[word]) >> bit % 32);
  }

  /// The distance of a key from the query.
  template <typename C>
  __device__ C distance_to(int key) const {
    return static_cast<C>(key - origin_);
  }

 private:
  const Distances& distances_;
  uint32_t* bits_;
  bool has_bits_, follow_ = true;
  int base_ = 0;                          // position = key + base
  int origin_ = 0, begin_ = 0, end_ = 0;  // of a row: the key at distance 0, and those it may see
};

/// Calls visit(pack, key) for the packs of a thread, in a row that the whole block shares.
template <int packs, int width, typename Visit>
__device__ void each_pack(int shift, int keys, const Visit& visit) {
#pragma unroll
  for (int pack = 0; pack < packs; ++pack) {
    const int key = static_cast<int>(pack * blockDim.x + threadIdx.x) * width - shift;
    if (key < keys) visit(pack, key);
  }
}

/// Keys of a row that a thread keeps in registers: as many as a word has bits.
constexpr int softmax_keys = 32;

/// Threads of the largest block, which limit the registers of a kernel.
template <typename T>
constexpr int softmax_threads = sizeof(T) == 2 ? 640 : 512;

template <typename T>
__global__ void __launch_bounds__(softmax_threads<T>, 1)
    row_softmax_kernel(const __grid_constant__ ScoreArguments arguments, RowBlocks blocks,
                       bool aligned, int kept_keys) {
  using C = Compute<T>;
  constexpr int width = core::vector_width<T>, packs = softmax_keys / width;
  const Distances& distances = arguments.distances;
  const int keys = static_cast<int>(distances.keys);
  const C scale = static_cast<C>(arguments.scale);
  BlockKeys block(distances, blocks.first().batch);
  blocks.each_row([&](const Row& row) {
    if (!block.move_to(row)) {
      const size_t bits = (BlockKeys::words(keys) + 3) / 4 * 16;
      auto* kept = reinterpret_cast<C*>(core::dynamic_shared_memory() + bits);
      softmax_of_row<T>(arguments, row, kept, kept_keys);
      return;
    }
    const BiasLine<C> line = bias_line<C>(arguments.slopes, distances, row.batch, row.head);
    const T* in = row_data<const T>(arguments.in, row);
    T* out = row_data<T>(arguments.out, row);
    const int shift = shift_of(out);
    Pack<T> loaded[packs];
    unsigned seen = 0;  // a bit for each key
    const auto seen_in = [&](int pack) { return seen >> pack * width & all_keys<width>; };
    each_pack<packs, width>(shift, keys, [&](int pack, int key) {
      const unsigned sees = block.seen<width>(key);
      seen |= sees << pack * width;
      if (sees != 0) loaded[pack] = load_pack(in, key, keys, sees, aligned);
    });
    C values[packs][width];
    C max_score = -static_cast<C>(INFINITY);
    each_pack<packs, width>(shift, keys, [&](int pack, int key) {
      if (seen_in(pack) == 0) return;
      unpack(loaded[pack], values[pack]);
      apply_biases<true>(line, block.distance_to<C>(key), seen_in(pack), scale, false,
                         values[pack]);
#pragma unroll
      for (int i = 0; i < width; ++i) max_score = fmax(values[pack][i], max_score);  // skips NaN
    });
    max_score = core::over_block_once(max_score, core::Larger());
    if (max_score == -static_cast<C>(INFINITY)) max_score = 0;
    C part = 0;
#pragma unroll
    for (int pack = 0; pack < packs; ++pack) {
      if (seen_in(pack) == 0) continue;
#pragma unroll
      for (int i = 0; i < width; ++i) {
        part += values[pack][i] = exponential_for<T>(values[pack][i] - max_score);
      }
    }
    const C sum = core::over_block_once(part, core::Add());
    const C factor = sum == 0 ? C(0) : 1 / sum;  // all keys hidden: zeros
    // As on the CPU, a NaN among visible keys is seen in those that a mask hides.
    const C hidden_weight = is_plain(distances) ? C(0) : 0 * factor;
    each_pack<packs, width>(shift, keys, [&](int pack, int key) {
      C weights[width];
      if (seen_in(pack) != 0) {
#pragma unroll
        for (int i = 0; i < width; ++i) weights[i] = values[pack][i] * factor;
      } else {
#pragma unroll
        for (int i = 0; i < width; ++i) weights[i] = hidden_weight;
      }
      store_pack(pack_of<T>(weights), out, key, keys);
    });
  });
}

// -------------------------------------------------------------------------------------- gradients

/// Sums of a thread: distance * grad for keys up to the query, -distance * grad for those after it.
struct SlopeSums {
  double before = 0;
  double after = 0;

  __device__ void add(int32_t distance, double grad) {
    if (distance == hidden) return;
    (distance > 0 ? after : before) += distance > 0 ? -grad * distance : grad * distance;
  }
};

/// Stores the sums of row `number` out of `rows`; every thread must call it.
__device__ void store_sums(const SlopeSums& sums, const SlopeGradient& gradient, int64_t number,
                           int64_t rows) {
  const double before = core::over_block(sums.before, core::Add()),
               after = core::over_block(sums.after, core::Add());
  if (threadIdx.x != 0) return;
  gradient.partial[number] = gradient.sides == 1 ? before + after : before;
  if (gradient.sides == 2) gradient.partial[rows + number] = after;
}

/// Gradients of a row of any kind, by a block.
template <typename T>
__device__ __attribute__((noinline)) SlopeSums softmax_backward_of_row(
    const SoftmaxBackwardArguments& arguments, const Row& row, bool sums_slopes) {
  using C = Compute<T>;
  const Distances& distances = arguments.distances;
  const C scale = static_cast<C>(arguments.scale);
  const Query query(distances, row);
  const T* grad = row_data<const T>(arguments.grad, row);
  const T* weights = row_data<const T>(arguments.weights, row);
  T* out = row_data<T>(arguments.out, row);
  const int64_t end = query.visible_end();
  C dot = 0;
#pragma unroll 1
  for (int64_t key = threadIdx.x; key < end; key += blockDim.x) {
    if (query.sees(key)) dot = core::fma(core::load(grad[key]), core::load(weights[key]), dot);
  }
  const C mean = core::over_block(dot, core::Add());
  SlopeSums sums;
  // Hidden keys have gradient 0, even if memory holds NaN.
#pragma unroll 1
  for (int64_t key = threadIdx.x; key < distances.keys; key += blockDim.x) {
    C value = 0;
    if (key < end && query.sees(key)) {
      value = core::load(weights[key]) * (core::load(grad[key]) - mean);
      if (sums_slopes) sums.add(query.distance_to(key), value);
    }
    core::store(value * scale, out + key);
  }
  return sums;
}

template <typename T>
__global__ void __launch_bounds__(block_size)
    softmax_backward_kernel(const __grid_constant__ SoftmaxBackwardArguments arguments,
                            RowNumbers numbers) {
  const SlopeGradient& gradient = arguments.slopes;
  const int64_t rows = arguments.batch * gradient.heads * arguments.distances.queries;
  for (int64_t number = blockIdx.x; number < rows; number += gridDim.x) {
    const bool sums_slopes = gradient.sides > 0;
    const auto sums = softmax_backward_of_row<T>(arguments, numbers.row(number), sums_slopes);
    if (sums_slopes) store_sums(sums, gradient, number, rows);
  }
}

/// Keys of a row that a thread keeps in registers: 128 bytes of each matrix.
template <typename T>
constexpr int backward_keys = 128 / static_cast<int>(sizeof(T));
constexpr int backward_threads = 512;

/// Gradients of scores alone.
template <typename T>
__global__ void __launch_bounds__(backward_threads, 1)
    row_softmax_backward_kernel(const __grid_constant__ SoftmaxBackwardArguments arguments,
                                RowBlocks blocks, bool aligned) {
  using C = Compute<T>;
  constexpr int width = core::vector_width<T>, packs = backward_keys<T> / width;
  const Distances& distances = arguments.distances;
  const int keys = static_cast<int>(distances.keys);
  const C scale = static_cast<C>(arguments.scale);
  BlockKeys block(distances, blocks.first().batch);
  blocks.each_row([&](const Row& row) {
    if (!block.move_to(row)) {
      softmax_backward_of_row<T>(arguments, row, /*sums_slopes=*/false);
      return;
    }
    const T* grad = row_data<const T>(arguments.grad, row);
    const T* weights = row_data<const T>(arguments.weights, row);
    T* out = row_data<T>(arguments.out, row);
    const int shift = shift_of(out);
    Pack<T> g[packs], w[packs];
    uint64_t seen = 0;  // a bit for each key
    const auto seen_in = [&](int pack) {
      return static_cast<unsigned>(seen >> pack * width) & all_keys<width>;
    };
    // Hidden keys have gradient 0, even if memory holds NaN.
    each_pack<packs, width>(shift, keys, [&](int pack, int key) {
      const unsigned sees = block.seen<width>(key);
      if (sees == 0) return;
      seen |= uint64_t{sees} << pack * width;
      g[pack] = only(load_pack(grad, key, keys, sees, aligned), sees);
      w[pack] = only(load_pack(weights, key, keys, sees, aligned), sees);
    });
    C dot = 0;
#pragma unroll
    for (int pack = 0; pack < packs; ++pack) {
      if (seen_in(pack) == 0) continue;
      C score_grads[width], values[width];
      unpack(g[pack], score_grads);
      unpack(w[pack], values);
#pragma unroll
      for (int i = 0; i < width; ++i) dot = core::fma(score_grads[i], values[i], dot);
    }
    const C mean = core::over_block(dot, core::Add());
    each_pack<packs, width>(shift, keys, [&](int pack, int key) {
      Pack<T> result = {};
      if (const unsigned sees = seen_in(pack); sees != 0) {
        C score_grads[width], values[width];
        unpack(g[pack], score_grads);
        unpack(w[pack], values);
#pragma unroll
        for (int i = 0; i < width; ++i) {
          score_grads[i] = values[i] * (score_grads[i] - mean) * scale;
        }
        result = only(pack_of<T>(score_grads), sees);
      }
      store_pack(result, out, key, keys);
    });
  });
}

template <typename T>
__global__ void __launch_bounds__(block_size)
    reduce_rows_kernel(ReduceArguments arguments, RowNumbers numbers) {
  const Distances& distances = arguments.distances;
  const SlopeGradient& gradient = arguments.slopes;
  const int64_t rows = arguments.batch * gradient.heads * distances.queries;
  for (int64_t number = blockIdx.x; number < rows; number += gridDim.x) {
    const Row row = numbers.row(number);
    const Query query(distances, row);
    const T* grad = row_data<const T>(arguments.grad, row);
    SlopeSums sums;
    for (int64_t key = threadIdx.x; key < query.visible_end(); key += block_size) {
      sums.add(query.distance_to(key), core::load(grad[key]));
    }
    store_sums(sums, gradient, number, rows);
  }
}

__global__ void reduce_heads_kernel(SlopeGradient gradient, int64_t batch, int64_t queries) {
  const int64_t head = blockIdx.x % gradient.heads, sample = blockIdx.x / gradient.heads;
  const int64_t summed = gradient.by_sample ? 1 : batch;
  const auto sum_of = [&](int64_t side) {
    double part = 0;
    for (int64_t i = threadIdx.x; i < summed * queries; i += block_size) {
      const int64_t plane = (side * batch + sample + i / queries) * gradient.heads + head;
      part += gradient.partial[plane * queries + i % queries];
    }
    return core::over_block(part, core::Add());
  };
  const double before = sum_of(0), after = gradient.sides == 2 ? sum_of(1) : 0.0;
  if (threadIdx.x == 0) store_slope_gradient(before, after, gradient, sample, head);
}

const char* launch_reduce_heads(const SlopeGradient& gradient, int64_t batch, int64_t queries,
                                core::CudaStream stream) {
  const int64_t samples = gradient.by_sample ? batch : 1;
  const auto blocks = static_cast<unsigned>(samples * gradient.heads);
  return core::checked_launch(reduce_heads_kernel, blocks, block_size, 0, stream, gradient, batch,
                              queries);
}

// --------------------------------------------------------------------------------------- launches

template <typename T>
int64_t address_of(const Matrices& matrices) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(matrices.data) / sizeof(T));
}

/// Whether rows begin equally far from 16-byte boundaries.
template <typename T>
bool aligned_alike(const Matrices& matrices, const Matrices& others) {
  int64_t all = address_of<T>(matrices) - address_of<T>(others);
  for (int i = 0; i < 3; ++i) all |= matrices.stride[i] - others.stride[i];
  return all % core::vector_width<T> == 0;
}

/// Keys of a row with those before it in its first pack, at most.
template <typename T>
int64_t span_of(const Matrices& matrices, const Distances& distances) {
  const auto* stride = matrices.stride;
  const int64_t all = address_of<T>(matrices) | stride[0] | stride[1] | stride[2];
  const bool at_boundary = all % core::vector_width<T> == 0;
  return distances.keys + (at_boundary ? 0 : core::vector_width<T> - 1);
}

template <typename T, bool adds>
const char* launch_bias(const ScoreArguments& arguments, core::CudaStream stream) {
  const Distances& distances = arguments.distances;
  constexpr int width = core::vector_width<T>;
  if (distances.keys == 0) return nullptr;
  // The rows of a tile have their packs at the same keys.
  const int64_t rows = arguments.out.stride[2] % width == 0 ? 16 : 1;
  const Tiles tiles = Tiles::of(arguments.batch, arguments.slopes.heads, distances,
                                span_of<T>(arguments.out, distances), width, rows);
  return core::checked_launch(bias_kernel<T, adds>, tiles.blocks(), block_size, 0, stream,
                              arguments, tiles, aligned_alike<T>(arguments.in, arguments.out));
}

template <typename T>
const char* launch_general_softmax(const ScoreArguments& arguments, core::CudaStream stream) {
  using C = Compute<T>;
  const Distances& distances = arguments.distances;
  const int64_t heads = arguments.slopes.heads;
  const unsigned blocks = blocks_for(arguments.batch * heads * distances.queries);
  const int64_t kept = std::min<int64_t>(distances.keys, kept_bytes / sizeof(C));
  return core::checked_launch(softmax_kernel<T>, blocks, block_size,
                              static_cast<size_t>(kept) * sizeof(C), stream, arguments,
                              RowNumbers::of(heads, distances.queries), kept);
}

/// Uses row_softmax_kernel if a row fits in the registers of a block.
template <typename T>
const char* launch_softmax(const ScoreArguments& arguments, core::CudaStream stream) {
  const Distances& distances = arguments.distances;
  if constexpr (!std::is_same_v<T, double>) {
    const int64_t span = span_of<T>(arguments.out, distances);
    const RowBlocks rows =
        RowBlocks::of(arguments.batch, arguments.slopes.heads, distances, span, softmax_keys);
    if (distances.apply_mask && span <= softmax_threads<T> * softmax_keys &&
        rows.blocks <= INT32_MAX) {
      const int64_t bits = (BlockKeys::words(distances.keys) + 3) / 4 * 16;
      // Scores of rows whose positions do not follow one another.
      const int64_t room = (kept_bytes - bits) / static_cast<int64_t>(sizeof(float));
      const bool may_keep = distances.key_positions.data != nullptr;
      const auto kept = static_cast<int>(may_keep ? std::min(distances.keys, room) : 0);
      const size_t bytes =
          is_plain(distances) ? 0 : static_cast<size_t>(bits) + kept * sizeof(float);
      return core::checked_launch(row_softmax_kernel<T>, rows.blocks, rows.threads, bytes, stream,
                                  arguments, rows, aligned_alike<T>(arguments.in, arguments.out),
                                  kept);
    }
  }
  return launch_general_softmax<T>(arguments, stream);
}

template <typename T>
const char* launch_general_softmax_backward(const SoftmaxBackwardArguments& arguments,
                                            core::CudaStream stream) {
  const SlopeGradient& gradient = arguments.slopes;
  const int64_t queries = arguments.distances.queries;
  const unsigned blocks = blocks_for(arguments.batch * gradient.heads * queries);
  const char* error =
      core::checked_launch(softmax_backward_kernel<T>, blocks, block_size, 0, stream, arguments,
                           RowNumbers::of(gradient.heads, queries));
  if (error != nullptr || gradient.sides == 0) return error;
  return launch_reduce_heads(gradient, arguments.batch, queries, stream);
}

template <typename T>
const char* launch_softmax_backward(const SoftmaxBackwardArguments& arguments,
                                    core::CudaStream stream) {
  const Distances& distances = arguments.distances;
  if constexpr (!std::is_same_v<T, double>) {
    const int64_t span = span_of<T>(arguments.out, distances);
    const RowBlocks rows =
        RowBlocks::of(arguments.batch, arguments.slopes.heads, distances, span, backward_keys<T>);
    if (distances.apply_mask && arguments.slopes.sides == 0 &&
        span <= backward_threads * backward_keys<T> && rows.blocks <= INT32_MAX) {
      const bool aligned = aligned_alike<T>(arguments.grad, arguments.out) &&
                           aligned_alike<T>(arguments.weights, arguments.out);
      const size_t bytes = BlockKeys::words(distances.keys) * sizeof(uint32_t);
      return core::checked_launch(row_softmax_backward_kernel<T>, rows.blocks, rows.threads,
                                  is_plain(distances) ? 0 : bytes, stream, arguments, rows,
                                  aligned);
    }
  }
  return launch_general_softmax_backward<T>(arguments, stream);
}

template <typename T>
const char* launch_reduce(const ReduceArguments& arguments, core::CudaStream stream) {
  const int64_t queries = arguments.distances.queries;
  const unsigned blocks = blocks_for(arguments.batch * arguments.slopes.heads * queries);
  const char* error =
      core::checked_launch(reduce_rows_kernel<T>, blocks, block_size, 0, stream, arguments,
                           RowNumbers::of(arguments.slopes.heads, queries));
  if (error != nullptr) return error;
  return launch_reduce_heads(arguments.slopes, arguments.batch, queries, stream);
}

}  // namespace

const char* fill_cuda(const FillArguments& arguments, core::CudaStream stream) {
  const ScoreArguments scores{arguments.slopes, arguments.distances, arguments.scalar,
                              arguments.batch,  /*scale=*/1,         arguments.out,
                              arguments.out};
  return core::visit_scalar(scores.scalar, [&](auto tag) {
    return launch_bias<typename decltype(tag)::type, false>(scores, stream);
  });
}

const char* add_cuda(const ScoreArguments& arguments, core::CudaStream stream) {
  return core::visit_scalar(arguments.scalar, [&](auto tag) {
    return launch_bias<typename decltype(tag)::type, true>(arguments, stream);
  });
}

const char* softmax_cuda(const ScoreArguments& arguments, core::CudaStream stream) {
  return core::visit_scalar(arguments.scalar, [&](auto tag) {
    return launch_softmax<typename decltype(tag)::type>(arguments, stream);
  });
}

const char* softmax_backward_cuda(const SoftmaxBackwardArguments& arguments,
                                  core::CudaStream stream) {
  return core::visit_scalar(arguments.scalar, [&](auto tag) {
    return launch_softmax_backward<typename decltype(tag)::type>(arguments, stream);
  });
}

const char* reduce_cuda(const ReduceArguments& arguments, core::CudaStream stream) {
  return core::visit_scalar(arguments.scalar, [&](auto tag) {
    return launch_reduce<typename decltype(tag)::type>(arguments, stream);
  });
}

}  // namespace posembed::alibi
