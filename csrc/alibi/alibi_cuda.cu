// ALiBi on CUDA: biases are computed in registers from distances, 16 bytes of a row at a time.
// Every kernel is memory-bound. The kernel of each row:
//   bias, scores + bias   fill_kernel, add_kernel: a lane takes a pack of keys in several rows
//   softmax               row_softmax_kernel, if a block keeps the row in registers;
//                         softmax_kernel otherwise: float64, long rows, rows of an odd length
//   its gradients         row_softmax_backward_kernel for scores alone, if the row fits;
//                         softmax_backward_kernel otherwise: the same, and gradients of slopes
#include <algorithm>

#include "alibi/alibi.h"
#include "core/block_reduce.h"
#include "core/device_store.h"
#include "core/divisor.h"
#include "core/exp.h"

namespace posembed::alibi {
namespace {

using core::Compute;
using core::Vector;

constexpr int block_size = 256;
constexpr int64_t max_blocks = int64_t{1} << 20;

unsigned blocks_for(int64_t rows) { return static_cast<unsigned>(std::min(rows, max_blocks)); }

// ---------------------------------------------------------------------------------------- one row

/// The query of a row. `plain`: distances to keys depend only on key - query.
template <bool plain>
class Query {
 public:
  __device__ Query(const Distances& distances, const Row& row)
      : distances_(distances),
        batch_(row.batch),
        position_(plain ? distances.offset + row.query
                        : query_position(distances, row.batch, row.query)),
        document_(plain ? KeyRange{0, distances.keys} : document_of(distances, row.query)) {}

  __device__ int32_t distance_to(int64_t key) const {
    if constexpr (plain) return causal_distance(distances_, static_cast<int32_t>(key - position_));
    if (key < document_.begin || key >= document_.end) return hidden;
    if (is_masked(distances_, batch_, key)) return hidden;
    const int64_t distance = key_position(distances_, batch_, key) - position_;
    if (distance > INT32_MAX || distance < -INT32_MAX) {
      core::record_error(distances_.error, core::ErrorKind::distance, distance, key, 0);
      return hidden;
    }
    return causal_distance(distances_, static_cast<int32_t>(distance));
  }

  /// Whether the softmax gave the key a weight. Reads no position that does not decide it.
  __device__ bool sees(int64_t key) const {
    if (plain || !distances_.apply_mask) return key < visible_end();
    if (key < document_.begin || key >= document_.end) return false;
    if (is_masked(distances_, batch_, key)) return false;
    return !distances_.causal || key_position(distances_, batch_, key) <= position_;
  }

  /// Keys from here on are hidden and have weight 0.
  __device__ int64_t visible_end() const {
    if (!plain || !distances_.causal || !distances_.apply_mask) return distances_.keys;
    const int64_t end = position_ + 1;
    return end < 0 ? 0 : (end < distances_.keys ? end : distances_.keys);
  }

 private:
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

/// Whole numbers up to this size, and their differences, are floats.
constexpr int64_t max_exact = 1 << 23;

/// NaN if the position is too large for exact differences.
template <typename C>
__device__ C exact(int64_t position) {
  return position <= max_exact && position >= -max_exact ? static_cast<C>(position)
                                                         : static_cast<C>(NAN);
}

/// The positions of `width` neighbouring keys.
template <typename C, int width>
struct Keys {
  C position[width];  // infinity: masked
  C first, last;      // the smallest and the largest of them; NaN if one is not exact
};

/// Keeps the compiler from computing a value again wherever it is used.
__device__ void compute_once([[maybe_unused]] float& value) {
#if defined(__CUDA_ARCH__)
  asm("" : "+f"(value));
#endif
}
__device__ void compute_once([[maybe_unused]] double& value) {
#if defined(__CUDA_ARCH__)
  asm("" : "+d"(value));
#endif
}

template <int width, bool plain, typename C>
__device__ Keys<C, width> keys_at(const Distances& distances, int64_t batch, int64_t key) {
  Keys<C, width> keys;
  bool all_exact = true;
#pragma unroll
  for (int i = 0; i < width; ++i) {
    const C position = !plain && is_masked(distances, batch, key + i)
                           ? static_cast<C>(INFINITY)
                           : exact<C>(plain ? key + i : key_position(distances, batch, key + i));
    keys.position[i] = position;
    keys.first = i == 0 || position < keys.first ? position : keys.first;
    keys.last = i == 0 || position > keys.last ? position : keys.last;
    all_exact = all_exact && position == position;
  }
  if (!all_exact) keys.first = keys.last = static_cast<C>(NAN);
  compute_once(keys.first);
  compute_once(keys.last);
  return keys;
}

/// The biases along a row, for packs of its keys. Moves from row to row of a head.
template <typename C, bool plain>
class RowBias {
 public:
  __device__ RowBias(const Distances& distances, const BiasLine<C>& line)
      : distances_(distances),
        line_(line),
        max_distance_(distances.causal ? C(0) : static_cast<C>(2 * max_exact)) {}

  __device__ void move_to(int64_t batch, int64_t query) {
    batch_ = batch;
    query_ = query;
    position_ =
        exact<C>(plain ? distances_.offset + query : query_position(distances_, batch, query));
    if (!has_documents()) return;
    // Neighbouring rows are mostly of the same document.
    const int64_t key = distances_.offset + query;  // of the query's token
    if (key < document_.begin || key >= document_.end) {
      document_ = document_of(distances_, query);
    }
  }

  /// Whether the query sees none of the keys.
  template <int width>
  __device__ bool hides(const Keys<C, width>& keys, int64_t key) const {
    if (has_documents() && (key >= document_.end || key + width <= document_.begin)) return true;
    return keys.first - position_ > max_distance_;  // false if one is NaN
  }

  /// The bias of a hidden key: -infinity, or 0.
  __device__ C hidden_bias() const { return line_.hidden; }

  /// Whether scores of hidden keys are not used.
  __device__ bool drops_hidden() const { return line_.hidden < 0; }

  __device__ void set_line(const BiasLine<C>& line) { line_ = line; }

  /// Whether the query's position is exact.
  __device__ bool is_exact() const { return position_ == position_; }

  template <int width>
  __device__ void fill(const Keys<C, width>& keys, int64_t key, C (&biases)[width]) const {
    visit<false>(
        keys, key, [&](int i, C slope, C distance) { biases[i] = slope * distance; },
        [&](int i) { biases[i] = line_.hidden; });
  }

  /// Adds biases to scores * scale. Hidden scores are not used: padding may hold NaN.
  /// `all_exact`: the caller knows that positions are exact.
  template <bool all_exact = false, int width>
  __device__ void add(const Keys<C, width>& keys, int64_t key, C scale, C (&scores)[width]) const {
    visit<all_exact>(
        keys, key,
        [&](int i, C slope, C distance) {
          scores[i] = core::fma(slope, distance, scores[i] * scale);
        },
        [&](int i) { scores[i] = drops_hidden() ? line_.hidden : scores[i] * scale; });
  }

 private:
  __device__ bool has_documents() const { return !plain && distances_.documents > 0; }

  /// Calls visible(i, slope, distance) or hidden(i) for each key.
  template <bool all_exact, int width, typename Visible, typename Hidden>
  __device__ void visit(const Keys<C, width>& keys, int64_t key, const Visible& visible,
                        const Hidden& hidden_key) const {
    const C nearest = keys.first - position_;
    const bool inside =
        !has_documents() || (key >= document_.begin && key + width <= document_.end);
    if (hides(keys, key)) {
#pragma unroll
      for (int i = 0; i < width; ++i) hidden_key(i);
    } else if (!all_exact && !(nearest == nearest)) {
      visit_one_by_one<width>(key, visible, hidden_key);
    } else if (keys.last <= position_ && inside) {
#pragma unroll
      for (int i = 0; i < width; ++i) visible(i, line_.before, keys.position[i] - position_);
    } else {
#pragma unroll
      for (int i = 0; i < width; ++i) {
        const C distance = keys.position[i] - position_;
        const bool outside = !inside && (key + i < document_.begin || key + i >= document_.end);
        if (distance > max_distance_ || outside) {
          hidden_key(i);
        } else {
          visible(i, distance > 0 ? line_.after : line_.before, distance);
        }
      }
    }
  }

  /// The same for positions that are not exact, and may be errors. Not unrolled, because this is
  /// rare and takes many registers.
  template <int width, typename Visible, typename Hidden>
  __device__ void visit_one_by_one(int64_t key, const Visible& visible,
                                   const Hidden& hidden_key) const {
    const Query<plain> query(distances_, {batch_, 0, query_});
#pragma unroll 1
    for (int at = 0; at < width; ++at) {
      const int32_t distance = query.distance_to(key + at);
#pragma unroll
      for (int i = 0; i < width; ++i) {
        if (i != at) continue;
        if (distance == hidden) {
          hidden_key(i);
        } else {
          visible(i, slope_at(line_, distance), static_cast<C>(distance));
        }
      }
    }
  }

  const Distances& distances_;
  BiasLine<C> line_;
  C max_distance_;  // keys at larger distances are hidden
  C position_ = 0;
  KeyRange document_ = {0, 0};
  int64_t batch_ = 0, query_ = 0;
};

template <int width, typename T>
__device__ void load_keys(const T* in, Compute<T> (&values)[width]) {
  const auto pack = *reinterpret_cast<const Vector<T, width>*>(in);
  core::load_all(pack.values, values);
}

template <int width, typename T>
__device__ void store_keys(const Compute<T> (&values)[width], T* out) {
  Vector<T, width> pack;
#pragma unroll
  for (int i = 0; i < width; ++i) core::store(values[i], pack.values + i);
  core::write_vector<T, width>(pack, out);
}

// ------------------------------------------------------------------------------------ fill and add

/// A warp takes a tile: a pack of keys for each lane, in some rows of one head. What depends on
/// keys or the head alone is computed once for all its rows.
struct Tile {
  int64_t batch, head;
  int64_t begin, end;  // queries
  int64_t key;         // the first key of the lane
};

struct Tiles {
  core::Divisor<int64_t> chunks, parts, heads;  // chunks of a row, parts of a head's rows
  int64_t count;
  int64_t rows;  // of a part

  static Tiles of(int64_t batch, int64_t heads, const Distances& distances, int width) {
    const auto divisor = [](int64_t value) {
      return core::Divisor<int64_t>::of(std::max<int64_t>(1, value));
    };
    const int64_t chunks = core::divide_up(distances.keys, core::warp_size * width);
    const int64_t planes = batch * heads;
    // Fewer rows where large tiles would leave multiprocessors without warps.
    const int64_t enough = int64_t{32} * core::multiprocessors();
    int64_t rows = 16;
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

/// Calls visit(tile, bias, keys) for every tile of the warp whose lane has keys.
template <int width, bool plain, typename C, typename Visit>
__device__ void for_each_tile(const Tiles& tiles, const Slopes& slopes, const Distances& distances,
                              const Visit& visit) {
  const int64_t first = int64_t{blockIdx.x} * Tiles::warps + threadIdx.x / core::warp_size;
  for (int64_t number = first; number < tiles.count; number += int64_t{gridDim.x} * Tiles::warps) {
    const Tile tile = tiles.tile(number, distances, width);
    if (tile.key >= distances.keys) continue;
    visit(tile,
          RowBias<C, plain>(distances, bias_line<C>(slopes, distances, tile.batch, tile.head)),
          keys_at<width, plain, C>(distances, tile.batch, tile.key));
  }
}

template <typename T, int width, bool plain>
__global__ void __launch_bounds__(block_size)
    fill_kernel(const __grid_constant__ FillArguments arguments, Tiles tiles) {
  using C = Compute<T>;
  const auto fill = [&](const Tile& tile, RowBias<C, plain> bias, const Keys<C, width>& keys) {
    T* out = row_data<T>(arguments.out, {tile.batch, tile.head, tile.begin}) + tile.key;
    for (int64_t query = tile.begin; query < tile.end; ++query) {
      bias.move_to(tile.batch, query);
      C biases[width] = {};
      bias.fill(keys, tile.key, biases);
      store_keys<width>(biases, out);
      out += arguments.out.stride[2];
    }
  };
  for_each_tile<width, plain, C>(tiles, arguments.slopes, arguments.distances, fill);
}

template <typename T, int width, bool plain>
__global__ void __launch_bounds__(block_size)
    add_kernel(const __grid_constant__ ScoreArguments arguments, Tiles tiles) {
  using C = Compute<T>;
  const C scale = static_cast<C>(arguments.scale);
  const auto add = [&](const Tile& tile, RowBias<C, plain> bias, const Keys<C, width>& keys) {
    const T* in = row_data<const T>(arguments.in, {tile.batch, tile.head, tile.begin}) + tile.key;
    T* out = row_data<T>(arguments.out, {tile.batch, tile.head, tile.begin}) + tile.key;
    for (int64_t query = tile.begin; query < tile.end; ++query) {
      bias.move_to(tile.batch, query);
      C scores[width] = {};
      if (!bias.drops_hidden() || !bias.hides(keys, tile.key)) load_keys<width>(in, scores);
      bias.add(keys, tile.key, scale, scores);
      store_keys<width>(scores, out);
      in += arguments.in.stride[2];
      out += arguments.out.stride[2];
    }
  };
  for_each_tile<width, plain, C>(tiles, arguments.slopes, arguments.distances, add);
}

// ----------------------------------------------------------------------------------------- softmax

__device__ float exponential(float x) { return core::exp_of_negative(x); }
__device__ double exponential(double x) { return exp(x); }

/// The maximum bytes of a row that stay in shared memory between passes; the rest is reloaded.
constexpr int64_t kept_bytes = 40 * 1024;

/// The softmax of a row of any kind, by a block.
template <typename T, int width, bool plain>
__device__ void softmax_of_row(const ScoreArguments& arguments, const Row& row, int64_t kept_keys) {
  using C = Compute<T>;
  C* const kept = reinterpret_cast<C*>(core::dynamic_shared_memory());
  const Distances& distances = arguments.distances;
  const C scale = static_cast<C>(arguments.scale);
  const Query<plain> query(distances, row);
  RowBias<C, plain> bias(distances, bias_line<C>(arguments.slopes, distances, row.batch, row.head));
  bias.move_to(row.batch, row.query);
  const T* in = row_data<const T>(arguments.in, row);
  T* out = row_data<T>(arguments.out, row);
  const int64_t end = query.visible_end();
  // A thread visits the same keys in every pass, so passes need no barrier between them.
  const auto each_pack = [&](auto visit) {
    for (int64_t key = int64_t{threadIdx.x} * width; key < end; key += blockDim.x * width) {
      visit(key);
    }
  };
  const auto read = [&](int64_t key, C(&scores)[width]) {
    load_keys<width>(in + key, scores);
    bias.add(keys_at<width, plain, C>(distances, row.batch, key), key, scale, scores);
  };
  C max_score = -static_cast<C>(INFINITY);
  each_pack([&](int64_t key) {
    C scores[width];
    read(key, scores);
    if (key < kept_keys) core::store_values<width>(scores, kept + key);
#pragma unroll
    for (int i = 0; i < width; ++i) max_score = scores[i] > max_score ? scores[i] : max_score;
  });
  max_score = core::over_block(max_score, core::Larger());
  if (max_score == -static_cast<C>(INFINITY)) max_score = 0;
  C part = 0;
  each_pack([&](int64_t key) {
    C values[width];
    if (key < kept_keys) {
      core::load_values<width>(kept + key, values);
    } else {
      read(key, values);
    }
#pragma unroll
    for (int i = 0; i < width; ++i) part += values[i] = exponential(values[i] - max_score);
    if (key < kept_keys) core::store_values<width>(values, kept + key);
  });
  const C sum = core::over_block(part, core::Add());
  const C factor = sum == 0 ? C(0) : 1 / sum;  // all keys hidden: zeros
  each_pack([&](int64_t key) {
    C values[width];
    if (key < kept_keys) {
      core::load_values<width>(kept + key, values);
    } else {
      read(key, values);
#pragma unroll
      for (int i = 0; i < width; ++i) values[i] = exponential(values[i] - max_score);
    }
#pragma unroll
    for (int i = 0; i < width; ++i) values[i] *= factor;
    store_keys<width>(values, out + key);
  });
  const int64_t written = (end + width - 1) / width * width;
  for (int64_t key = written + threadIdx.x; key < distances.keys; key += blockDim.x) {
    core::store(C(0), out + key);
  }
}

template <typename T, int width, bool plain>
__global__ void softmax_kernel(const __grid_constant__ ScoreArguments arguments, RowNumbers numbers,
                               int64_t kept_keys) {
  const int64_t rows = arguments.batch * arguments.slopes.heads * arguments.distances.queries;
  for (int64_t number = blockIdx.x; number < rows; number += gridDim.x) {
    softmax_of_row<T, width, plain>(arguments, numbers.row(number), kept_keys);
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
  return core::exp_of_negative(x);
}

// ------------------------------------------------------------------------------- rows in registers

/// A block has as many warps as a row needs, so that its threads keep the row in registers. It
/// processes `rows` rows of a batch, one after another.
struct RowBlocks {
  core::Divisor<int64_t> parts, queries;  // parts: blocks of a batch
  int64_t rows, rows_of_batch;
  unsigned blocks, threads;

  static RowBlocks of(int64_t batch, int64_t heads, const Distances& distances,
                      int keys_per_thread) {
    const auto divisor = [](int64_t value) {
      return core::Divisor<int64_t>::of(std::max<int64_t>(1, value));
    };
    const int64_t warps = core::divide_up(distances.keys, keys_per_thread * core::warp_size);
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

/// The first key of a thread's pack, in a row that the whole block shares.
template <int width>
__device__ int key_of(int pack) {
  return static_cast<int>(pack * blockDim.x + threadIdx.x) * width;
}

/// Calls visit(pack, key) for the packs of a thread.
template <int packs, int width, typename Visit>
__device__ void each_pack(int keys, const Visit& visit) {
#pragma unroll
  for (int pack = 0; pack < packs; ++pack) {
    const int key = key_of<width>(pack);
    if (key < keys) visit(pack, key);
  }
}

/// The number of keys, from the first one, that the query of a row of plain ALiBi sees.
__device__ int visible_keys(const Distances& distances, int64_t query) {
  return static_cast<int>(Query<true>(distances, {0, 0, query}).visible_end());
}

/// Keys of a row that a thread keeps in registers.
constexpr int softmax_keys = 32;

/// The positions of the keys of a block's threads, in shared memory. Each thread reads its own.
template <typename C, int width>
class KeyTable {
 public:
  __device__ explicit KeyTable(int packs)
      : positions_(reinterpret_cast<C*>(core::dynamic_shared_memory())),
        ends_(positions_ + packs * width * blockDim.x) {}

  static size_t bytes(unsigned threads, int packs) {
    return threads * static_cast<size_t>(packs) * (width + 2) * sizeof(C);
  }

  __device__ void write(int pack, const Keys<C, width>& keys) {
    const unsigned index = pack * blockDim.x + threadIdx.x;
    const C ends[2] = {keys.first, keys.last};
    core::store_values<width>(keys.position, positions_ + index * width);
    core::store_values<2>(ends, ends_ + index * 2);
  }

  __device__ Keys<C, width> at(int pack) const {
    const unsigned index = pack * blockDim.x + threadIdx.x;
    Keys<C, width> keys;
    C ends[2];
    core::load_values<width>(positions_ + index * width, keys.position);
    core::load_values<2>(ends_ + index * 2, ends);
    keys.first = ends[0];
    keys.last = ends[1];
    return keys;
  }

 private:
  C* positions_;
  C* ends_;
};

/// The biases of rows whose distances are key - query, for row_softmax_kernel.
template <typename C, int width, int packs>
class PlainRow {
 public:
  __device__ explicit PlainRow(const ScoreArguments& arguments) : arguments_(arguments) {}

  /// Prepares a block's rows; false if it cannot process them.
  __device__ bool read_keys(const RowBlocks&) { return true; }

  __device__ void move_to(const Row& row) {
    const Distances& distances = arguments_.distances;
    line_ = bias_line<C>(arguments_.slopes, distances, row.batch, row.head);
    if (distances.causal) line_.after = 0;  // hidden, or without bias
    position_ = static_cast<C>(distances.offset + row.query);
    end_ = visible_keys(distances, row.query);
  }

  __device__ bool needs(int, int key) const { return key < end_; }

  __device__ void add(int, int key, C scale, C (&scores)[width]) const {
    const C first = static_cast<C>(key) - position_;
    if (first + (width - 1) <= 0) {
#pragma unroll
      for (int i = 0; i < width; ++i) {
        scores[i] = core::fma(line_.before, first + static_cast<C>(i), scores[i] * scale);
      }
    } else {
#pragma unroll
      for (int i = 0; i < width; ++i) {
        const C distance = first + static_cast<C>(i);
        const C score =
            core::fma(distance > 0 ? line_.after : line_.before, distance, scores[i] * scale);
        scores[i] = key + i < end_ ? score : -static_cast<C>(INFINITY);
      }
    }
  }

  /// The weight of a pack of hidden keys.
  __device__ C hidden_weight(C) const { return 0; }

 private:
  const ScoreArguments& arguments_;
  BiasLine<C> line_ = {};
  C position_ = 0;
  int end_ = 0;
};

/// The same for rows with positions, masks or documents. Positions of keys are in shared memory.
template <typename C, int width, int packs>
class PositionedRow {
 public:
  __device__ explicit PositionedRow(const ScoreArguments& arguments)
      : arguments_(arguments), bias_(arguments.distances, {}), table_(packs) {}

  /// False if positions are not exact.
  __device__ bool read_keys(const RowBlocks& blocks) {
    const Distances& distances = arguments_.distances;
    const int64_t batch = blocks.first().batch;
    bool exact = true;
#pragma unroll 1
    for (int pack = 0; pack < packs && key_of<width>(pack) < distances.keys; ++pack) {
      const auto keys = keys_at<width, false, C>(distances, batch, key_of<width>(pack));
      exact = exact && keys.first == keys.first;
      table_.write(pack, keys);
    }
    blocks.each_row([&](const Row& row) {
      bias_.move_to(row.batch, row.query);
      exact = exact && bias_.is_exact();
    });
    return core::over_block(exact ? 0 : 1, core::Larger()) == 0;
  }

  __device__ void move_to(const Row& row) {
    bias_.set_line(bias_line<C>(arguments_.slopes, arguments_.distances, row.batch, row.head));
    bias_.move_to(row.batch, row.query);
  }

  __device__ bool needs(int pack, int key) const {
    return !bias_.drops_hidden() || !bias_.hides(table_.at(pack), key);
  }

  __device__ void add(int pack, int key, C scale, C (&scores)[width]) const {
    bias_.template add<true>(table_.at(pack), key, scale, scores);
  }

  /// NaN if the row has one, as for hidden keys among visible ones.
  __device__ C hidden_weight(C factor) const { return 0 * factor; }

 private:
  const ScoreArguments& arguments_;
  RowBias<C, false> bias_;
  KeyTable<C, width> table_;
};

/// The softmax of a row whose positions are not exact, one key at a time. Short, because every
/// instantiation of row_softmax_kernel contains it for few rows.
template <typename T>
__device__ void softmax_one_by_one(const ScoreArguments& arguments, const Row& row) {
  using C = Compute<T>;
  const Distances& distances = arguments.distances;
  const Query<false> query(distances, row);
  const BiasLine<C> line = bias_line<C>(arguments.slopes, distances, row.batch, row.head);
  const T* in = row_data<const T>(arguments.in, row);
  T* out = row_data<T>(arguments.out, row);
  C max_score = -static_cast<C>(INFINITY), sum = 0;
#pragma unroll 1
  for (int pass = 0; pass < 3; ++pass) {
    C part = 0;
#pragma unroll 1
    for (int64_t key = threadIdx.x; key < distances.keys; key += blockDim.x) {
      const C score = biased(line, query.distance_to(key), core::load(in[key]),
                             static_cast<C>(arguments.scale));
      if (pass == 0) {
        max_score = score > max_score ? score : max_score;
        continue;
      }
      const C value = exponential(score - max_score);
      part += value;
      if (pass == 2) core::store(sum == 0 ? C(0) : value * (1 / sum), out + key);
    }
    if (pass == 0) {
      max_score = core::over_block(max_score, core::Larger());
      if (max_score == -static_cast<C>(INFINITY)) max_score = 0;
    } else if (pass == 1) {
      sum = core::over_block(part, core::Add());
    }
  }
}

/// Resident blocks per multiprocessor, which limit the registers of a kernel: as many as possible
/// without spills.
template <typename T, int width, bool plain>
constexpr int softmax_blocks = sizeof(T) == 4 || width == 2 ? 2 : (plain&& width == 8 ? 4 : 3);

template <typename T, int width, bool plain>
__global__ void __launch_bounds__(block_size, (softmax_blocks<T, width, plain>))
    row_softmax_kernel(const __grid_constant__ ScoreArguments arguments, RowBlocks blocks) {
  using C = Compute<T>;
  constexpr int packs = softmax_keys / width;
  const int keys = static_cast<int>(arguments.distances.keys);
  const C scale = static_cast<C>(arguments.scale);
  std::conditional_t<plain, PlainRow<C, width, packs>, PositionedRow<C, width, packs>> biases(
      arguments);
  if (!biases.read_keys(blocks)) {
    blocks.each_row([&](const Row& row) { softmax_one_by_one<T>(arguments, row); });
    return;
  }
  blocks.each_row([&](const Row& row) {
    biases.move_to(row);
    const T* in = row_data<const T>(arguments.in, row);
    T* out = row_data<T>(arguments.out, row);
    Vector<T, width> loaded[packs];
    unsigned needed = 0;  // a bit for each pack
    each_pack<packs, width>(keys, [&](int pack, int key) {
      if (!biases.needs(pack, key)) return;
      needed |= 1u << pack;
      loaded[pack] = *reinterpret_cast<const Vector<T, width>*>(in + key);
    });
    C values[packs][width];
    C max_score = -static_cast<C>(INFINITY);
#pragma unroll
    for (int pack = 0; pack < packs; ++pack) {
      if ((needed >> pack & 1) == 0) continue;
      const int key = key_of<width>(pack);
      core::load_all(loaded[pack].values, values[pack]);
      biases.add(pack, key, scale, values[pack]);
#pragma unroll
      for (int i = 0; i < width; ++i) max_score = fmax(values[pack][i], max_score);  // skips NaN
    }
    max_score = core::over_block(max_score, core::Larger());
    if (max_score == -static_cast<C>(INFINITY)) max_score = 0;
    C part = 0;
#pragma unroll
    for (int pack = 0; pack < packs; ++pack) {
      if ((needed >> pack & 1) == 0) continue;
#pragma unroll
      for (int i = 0; i < width; ++i) {
        part += values[pack][i] = exponential_for<T>(values[pack][i] - max_score);
      }
    }
    const C sum = core::over_block(part, core::Add());
    const C factor = sum == 0 ? C(0) : 1 / sum;  // all keys hidden: zeros
    each_pack<packs, width>(keys, [&](int pack, int key) {
      C weights[width];
      if ((needed >> pack & 1) != 0) {
#pragma unroll
        for (int i = 0; i < width; ++i) weights[i] = values[pack][i] * factor;
      } else {
#pragma unroll
        for (int i = 0; i < width; ++i) weights[i] = biases.hidden_weight(factor);
      }
      store_keys<width>(weights, out + key);
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

template <typename T, int width, bool plain>
__global__ void softmax_backward_kernel(SoftmaxBackwardArguments arguments, RowNumbers numbers) {
  using C = Compute<T>;
  const Distances& distances = arguments.distances;
  const SlopeGradient& gradient = arguments.slopes;
  const int64_t rows = arguments.batch * gradient.heads * distances.queries;
  const C scale = static_cast<C>(arguments.scale);
  for (int64_t number = blockIdx.x; number < rows; number += gridDim.x) {
    const Row row = numbers.row(number);
    const Query<plain> query(distances, row);
    const T* grad = row_data<const T>(arguments.grad, row);
    const T* weights = row_data<const T>(arguments.weights, row);
    T* out = row_data<T>(arguments.out, row);
    const int64_t end = query.visible_end();
    const auto each_pack = [&](int64_t keys, auto visit) {
      for (int64_t key = int64_t{threadIdx.x} * width; key < keys; key += block_size * width) {
        visit(key);
      }
    };
    bool has_nan = false;
    /// The keys in a pack that the query sees, a bit for each.
    const auto seen_of = [&](int64_t key) {
      unsigned seen = 0;
#pragma unroll
      for (int i = 0; i < width; ++i) {
        seen |= unsigned{has_nan ? query.sees(key + i) : key + i < end} << i;
      }
      return seen;
    };
    const auto dot_of_row = [&] {
      C dot = 0;
      each_pack(end, [&](int64_t key) {
        const unsigned seen = seen_of(key);
        C g[width], w[width];
        load_keys<width>(grad + key, g);
        load_keys<width>(weights + key, w);
#pragma unroll
        for (int i = 0; i < width; ++i) {
          dot = (seen >> i & 1) != 0 ? core::fma(g[i], w[i], dot) : dot;
        }
      });
      return core::over_block(dot, core::Add());
    };
    C mean = dot_of_row();
    // Hidden keys have weight 0. Only where their memory holds NaN does the sum show them.
    if (!plain && distances.apply_mask && !(mean - mean == 0)) {
      has_nan = true;
      mean = dot_of_row();
    }
    SlopeSums sums;
    each_pack(distances.keys, [&](int64_t key) {
      const unsigned seen = key < end ? seen_of(key) : 0;
      C g[width] = {}, w[width] = {};
      if (seen != 0) {
        load_keys<width>(grad + key, g);
        load_keys<width>(weights + key, w);
      }
      // Hidden keys have gradient 0, even if memory holds NaN.
#pragma unroll
      for (int i = 0; i < width; ++i) g[i] = (seen >> i & 1) != 0 ? w[i] * (g[i] - mean) : C(0);
      if (gradient.sides > 0) {
#pragma unroll
        for (int i = 0; i < width; ++i) {
          if ((seen >> i & 1) != 0) sums.add(query.distance_to(key + i), g[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < width; ++i) g[i] *= scale;
      store_keys<width>(g, out + key);
    });
    if (gradient.sides > 0) store_sums(sums, gradient, number, rows);
  }
}

/// Keys of a row that a thread keeps in registers: 128 bytes of each matrix.
template <typename T>
constexpr int backward_keys = 128 / static_cast<int>(sizeof(T));

/// Gradients of scores alone. `plain`: what a query sees depends on its place alone.
template <typename T, int width, bool plain>
__global__ void __launch_bounds__(block_size, 2)
    row_softmax_backward_kernel(const __grid_constant__ SoftmaxBackwardArguments arguments,
                                RowBlocks blocks) {
  using C = Compute<T>;
  using Pack = Vector<T, width>;
  constexpr int packs = backward_keys<T> / width;
  const Distances& distances = arguments.distances;
  const int keys = static_cast<int>(distances.keys);
  const C scale = static_cast<C>(arguments.scale);
  blocks.each_row([&](const Row& row) {
    const int end = plain ? visible_keys(distances, row.query) : keys;
    const T* grad = row_data<const T>(arguments.grad, row);
    const T* weights = row_data<const T>(arguments.weights, row);
    T* out = row_data<T>(arguments.out, row);
    Pack g[packs], w[packs];
    each_pack<packs, width>(end, [&](int pack, int key) {
      g[pack] = *reinterpret_cast<const Pack*>(grad + key);
      w[pack] = *reinterpret_cast<const Pack*>(weights + key);
    });
    // Hidden keys have gradient 0, even if memory holds NaN.
    const auto hide = [&](int key, C(&values)[width]) {
      if (key + width <= end) return;
#pragma unroll
      for (int i = 0; i < width; ++i) values[i] = key + i < end ? values[i] : C(0);
    };
    const auto dot_of_row = [&] {
      C dot = 0;
      each_pack<packs, width>(end, [&](int pack, int key) {
        C weight_grads[width], values[width];
        core::load_all(g[pack].values, weight_grads);
        core::load_all(w[pack].values, values);
        hide(key, weight_grads);
        hide(key, values);
#pragma unroll
        for (int i = 0; i < width; ++i) dot = core::fma(weight_grads[i], values[i], dot);
      });
      return core::over_block(dot, core::Add());
    };
    C mean = dot_of_row();
    // Keys that other rules hide have weight 0. Only where memory holds NaN does the sum show them.
    if constexpr (!plain) {
      if (!(mean - mean == 0)) {
        const Query<false> query(distances, row);
        each_pack<packs, width>(end, [&](int pack, int key) {
#pragma unroll
          for (int i = 0; i < width; ++i) {
            if (query.sees(key + i)) continue;
            g[pack].values[i] = T{};
            core::store(C(-1), w[pack].values + i);  // no weight: marks the key as hidden
          }
        });
        mean = dot_of_row();
      }
    }
    each_pack<packs, width>(keys, [&](int pack, int key) {
      C score_grads[width] = {}, values[width];
      if (key < end) {
        core::load_all(g[pack].values, score_grads);
        core::load_all(w[pack].values, values);
#pragma unroll
        for (int i = 0; i < width; ++i) {
          const bool hidden_key = !plain && values[i] < 0;
          score_grads[i] = hidden_key ? C(0) : values[i] * (score_grads[i] - mean) * scale;
        }
        hide(key, score_grads);
      }
      store_keys<width>(score_grads, out + key);
    });
  });
}

template <typename T, bool plain>
__global__ void reduce_rows_kernel(ReduceArguments arguments, RowNumbers numbers) {
  const Distances& distances = arguments.distances;
  const SlopeGradient& gradient = arguments.slopes;
  const int64_t rows = arguments.batch * gradient.heads * distances.queries;
  for (int64_t number = blockIdx.x; number < rows; number += gridDim.x) {
    const Row row = numbers.row(number);
    const Query<plain> query(distances, row);
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

/// The largest number of keys, up to 16 bytes, in which all rows can be read and written.
template <typename T>
int64_t width_of(const Matrices& matrices, int64_t keys) {
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(matrices.data) / sizeof(T));
  const auto* stride = matrices.stride;
  const int64_t all = core::vector_width<T> | keys | address | stride[0] | stride[1] | stride[2];
  return all & -all;
}

/// Returns launch(width, plain), both passed as types so that kernels can use them as constants.
/// Tries `width`, width / step, and so on; none below `min_width`.
template <int width, int step, int min_width, typename Launch>
const char* with_form(int64_t max_width, const Distances& distances, Launch launch) {
  if constexpr (width > 1 && width / step >= min_width) {
    if (max_width < width) {
      return with_form<width / step, step, min_width>(max_width, distances, launch);
    }
  }
  const std::integral_constant<int, width> constant;
  return distances.plain() ? launch(constant, std::true_type())
                           : launch(constant, std::false_type());
}

/// The same with all widths of a type.
template <typename T, typename Launch>
const char* with_all_widths(int64_t max_width, const Distances& distances, Launch launch) {
  return with_form<core::vector_width<T>, 2, 1>(max_width, distances, launch);
}

/// The same with the widths of kernels that keep rows in registers.
template <typename T, typename Launch>
const char* with_row_widths(int64_t max_width, const Distances& distances, Launch launch) {
  return with_form<core::vector_width<T>, 2, 2>(max_width, distances, launch);
}

/// The same with the widths of general kernels: whole vectors and single keys.
template <typename T, typename Launch>
const char* with_general_widths(int64_t max_width, const Distances& distances, Launch launch) {
  return with_form<core::vector_width<T>, core::vector_width<T>, 1>(max_width, distances, launch);
}

template <typename T>
const char* launch_fill(const FillArguments& arguments, core::CudaStream stream) {
  const Distances& distances = arguments.distances;
  const int64_t max_width = width_of<T>(arguments.out, distances.keys);
  return with_all_widths<T>(max_width, distances, [&](auto width, auto plain) {
    const Tiles tiles = Tiles::of(arguments.batch, arguments.slopes.heads, distances, width());
    return core::checked_launch(fill_kernel<T, width(), plain()>, tiles.blocks(), block_size, 0,
                                stream, arguments, tiles);
  });
}

template <typename T>
int64_t width_of(const ScoreArguments& arguments) {
  return std::min(width_of<T>(arguments.in, arguments.distances.keys),
                  width_of<T>(arguments.out, arguments.distances.keys));
}

RowNumbers numbers_of(const ScoreArguments& arguments) {
  return RowNumbers::of(arguments.slopes.heads, arguments.distances.queries);
}

int64_t rows_of(const ScoreArguments& arguments) {
  return arguments.batch * arguments.slopes.heads * arguments.distances.queries;
}

template <typename T>
const char* launch_add(const ScoreArguments& arguments, core::CudaStream stream) {
  const Distances& distances = arguments.distances;
  return with_all_widths<T>(width_of<T>(arguments), distances, [&](auto width, auto plain) {
    const Tiles tiles = Tiles::of(arguments.batch, arguments.slopes.heads, distances, width());
    return core::checked_launch(add_kernel<T, width(), plain()>, tiles.blocks(), block_size, 0,
                                stream, arguments, tiles);
  });
}

template <typename T>
const char* launch_general_softmax(const ScoreArguments& arguments, core::CudaStream stream) {
  using C = Compute<T>;
  const Distances& distances = arguments.distances;
  const unsigned blocks = blocks_for(rows_of(arguments));
  const int64_t kept = std::min<int64_t>(distances.keys, kept_bytes / sizeof(C));
  const size_t bytes = static_cast<size_t>(kept) * sizeof(C);
  return with_general_widths<T>(width_of<T>(arguments), distances, [&](auto width, auto plain) {
    return core::checked_launch(softmax_kernel<T, width(), plain()>, blocks, block_size, bytes,
                                stream, arguments, numbers_of(arguments), kept);
  });
}

/// Uses row_softmax_kernel if a row fits in the registers of a block, and its positions in shared
/// memory.
template <typename T>
const char* launch_softmax(const ScoreArguments& arguments, core::CudaStream stream) {
  const Distances& distances = arguments.distances;
  const int64_t max_width = width_of<T>(arguments);
  const bool exact = std::abs(distances.offset) + distances.queries <= max_exact;
  if constexpr (!std::is_same_v<T, double>) {
    if (max_width > 1 && distances.keys <= block_size * softmax_keys &&
        (exact || !distances.plain())) {
      const RowBlocks rows =
          RowBlocks::of(arguments.batch, arguments.slopes.heads, distances, softmax_keys);
      return with_row_widths<T>(max_width, distances, [&](auto width, auto plain) {
        const size_t bytes =
            plain() ? 0
                    : KeyTable<Compute<T>, width()>::bytes(rows.threads, softmax_keys / width());
        const bool fits = bytes <= kept_bytes && rows.blocks <= INT32_MAX;
        if (!fits) return launch_general_softmax<T>(arguments, stream);
        return core::checked_launch(row_softmax_kernel<T, width(), plain()>, rows.blocks,
                                    rows.threads, bytes, stream, arguments, rows);
      });
    }
  }
  return launch_general_softmax<T>(arguments, stream);
}

template <typename T>
int64_t width_of(const SoftmaxBackwardArguments& arguments) {
  const int64_t keys = arguments.distances.keys;
  return std::min({width_of<T>(arguments.grad, keys), width_of<T>(arguments.weights, keys),
                   width_of<T>(arguments.out, keys)});
}

template <typename T>
const char* launch_general_softmax_backward(const SoftmaxBackwardArguments& arguments,
                                            core::CudaStream stream) {
  const SlopeGradient& gradient = arguments.slopes;
  const Distances& distances = arguments.distances;
  const unsigned blocks = blocks_for(arguments.batch * gradient.heads * distances.queries);
  const RowNumbers numbers = RowNumbers::of(gradient.heads, distances.queries);
  const char* error =
      with_general_widths<T>(width_of<T>(arguments), distances, [&](auto width, auto plain) {
        return core::checked_launch(softmax_backward_kernel<T, width(), plain()>, blocks,
                                    block_size, 0, stream, arguments, numbers);
      });
  if (error != nullptr || gradient.sides == 0) return error;
  return launch_reduce_heads(gradient, arguments.batch, distances.queries, stream);
}

template <typename T>
const char* launch_row_softmax_backward(const SoftmaxBackwardArguments& arguments,
                                        int64_t max_width, core::CudaStream stream) {
  const Distances& distances = arguments.distances;
  const RowBlocks rows =
      RowBlocks::of(arguments.batch, arguments.slopes.heads, distances, backward_keys<T>);
  if (rows.blocks > INT32_MAX) return launch_general_softmax_backward<T>(arguments, stream);
  const bool hides = !distances.plain() && distances.apply_mask;
  return with_row_widths<T>(max_width, distances, [&](auto width, auto) {
    const auto kernel = hides ? row_softmax_backward_kernel<T, width(), false>
                              : row_softmax_backward_kernel<T, width(), true>;
    return core::checked_launch(kernel, rows.blocks, rows.threads, 0, stream, arguments, rows);
  });
}

template <typename T>
const char* launch_softmax_backward(const SoftmaxBackwardArguments& arguments,
                                    core::CudaStream stream) {
  const int64_t max_width = width_of<T>(arguments);
  if constexpr (!std::is_same_v<T, double>) {
    const bool fits = arguments.distances.keys <= block_size * backward_keys<T>;
    if (arguments.slopes.sides == 0 && fits && max_width > 1) {
      return launch_row_softmax_backward<T>(arguments, max_width, stream);
    }
  }
  return launch_general_softmax_backward<T>(arguments, stream);
}

template <typename T>
const char* launch_reduce(const ReduceArguments& arguments, core::CudaStream stream) {
  const int64_t queries = arguments.distances.queries;
  const unsigned blocks = blocks_for(arguments.batch * arguments.slopes.heads * queries);
  const auto kernel =
      arguments.distances.plain() ? reduce_rows_kernel<T, true> : reduce_rows_kernel<T, false>;
  const char* error = core::checked_launch(kernel, blocks, block_size, 0, stream, arguments,
                                           RowNumbers::of(arguments.slopes.heads, queries));
  if (error != nullptr) return error;
  return launch_reduce_heads(arguments.slopes, arguments.batch, queries, stream);
}

}  // namespace

const char* fill_cuda(const FillArguments& arguments, core::CudaStream stream) {
  return core::visit_scalar(arguments.scalar, [&](auto tag) {
    return launch_fill<typename decltype(tag)::type>(arguments, stream);
  });
}

const char* add_cuda(const ScoreArguments& arguments, core::CudaStream stream) {
  return core::visit_scalar(arguments.scalar, [&](auto tag) {
    return launch_add<typename decltype(tag)::type>(arguments, stream);
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
