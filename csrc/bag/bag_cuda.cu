// A warp pools up to 16 bytes per lane of a bag's rows in the CPU kernel's order, so results have
// the same bits. A lane reads some of the bag's ids and passes them to the others, and loads a
// later row as soon as it has pooled one. In the backward pass a warp or a thread processes an id
// and finds its bag by binary search, so that long bags cost no more than short ones.
#include "bag/bag.h"
#include "core/block_reduce.h"
#include "core/device_vector.h"

namespace posembed::bag {
namespace {

using core::Compute;
using core::DeviceWords;
using core::divide_up;
using core::load;
using core::store;
using core::Vector;
using core::warp_size;

using core::blocks_for;
using core::Item;
using core::item_of_lane;
using core::threads;
using core::warps;

/// The division of rows among lanes.
struct WarpLayout {
  int64_t pieces;  // of a row, each for one warp
  unsigned lanes;  // of a row: a power of two; fewer than a warp's for narrow rows
};

/// The least bytes of a vector. Kernels for 4 bytes would gain little over single elements: a lane
/// spends its time on ids.
constexpr int min_vector_bytes = 8;

int64_t pieces_of(int64_t embedding_dim, int width) {
  return divide_up(embedding_dim, int64_t{warp_size} * width);
}

template <typename T, int width>
__device__ Vector<T, width> read_vector(const T* from) {
  return *reinterpret_cast<const Vector<T, width>*>(from);
}

// ---- pool ----

/// Records an error. Not inlined, because this rare case would take registers.
__device__ __attribute__((noinline)) void report(core::DeviceError* error, core::ErrorKind kind,
                                                 int64_t value, int64_t index, int64_t limit) {
  record_error(error, kind, value, index, limit);
}

/// The indices of a bag's ids. If its offsets are wrong, the first wrong one is recorded and the
/// bag is empty.
__device__ Range checked_range(const PoolArguments& a, int64_t bag, bool records) {
  const Bags& bags = a.bags;
  const Range range = range_of(bags, bag);
  const bool begins =
      range.begin >= 0 && range.begin <= bags.count && (bag > 0 || range.begin == 0);
  const bool ends = range.begin <= range.end && range.end <= bags.count &&
                    (bag + 1 < bags.bags || range.end == bags.count);
  if (begins && ends) return range;
  if (records) {
    report(a.error, core::ErrorKind::bag_offset, begins ? range.end : range.begin,
           begins ? bag + 1 : bag, bags.count);
  }
  return {0, 0};
}

/// The lanes of a warp that pool one bag, or a piece of its rows. Teams with narrow rows share a
/// warp, whose lanes take every step together, including inactive lanes.
struct Team {
  int lanes;  // a power of two
  Item item;  // the bag, and the first column of the calling lane
  Range range;
  bool active;   // whether the calling lane has a bag and columns
  bool records;  // whether this team records errors

  __device__ int lane() const { return static_cast<int>(threadIdx.x) & (lanes - 1); }
  __device__ int first_lane() const { return static_cast<int>(threadIdx.x) % warp_size & -lanes; }
};

template <int width>
__device__ Team team_of_lane(const PoolArguments& a, const WarpLayout& layout) {
  Team team;
  team.lanes = static_cast<int>(layout.lanes);
  if (team.lanes == warp_size) {
    team.item = item_of_lane<width>(layout.pieces, 1);
  } else {
    const int64_t thread = int64_t{blockIdx.x} * threads + threadIdx.x;
    team.item = {thread / team.lanes, thread % team.lanes * width};
  }
  const bool bag = team.item.row < a.bags.bags;
  team.records = bag && team.item.column == int64_t{team.lane()} * width;
  const bool first = team.records && team.item.column == 0;
  team.range = bag ? checked_range(a, team.item.row, first) : Range{0, 0};
  team.active = bag && team.item.column < a.embedding_dim;
  return team;
}

constexpr unsigned full_mask = 0xffffffffu;

/// Rows that a lane has in flight, and neighbouring ids that it reads for its team.
constexpr int in_flight = 8;

/// The rows of some ids of a bag, as elements from the table's first row; skipped: padding and
/// bad ids, which are recorded.
struct RowOffsets {
  static constexpr int64_t skipped = -1;
  int64_t lane_offsets[in_flight];  // those of the ids that the calling lane reads

  /// Reads the rows of the bag's ids from `begin` on. The whole warp calls it.
  __device__ RowOffsets(const PoolArguments& a, const Team& team, int64_t begin) {
    const int64_t first = begin + team.lane() * in_flight;
    const auto bad = [&](int64_t id) { return id < 0 || id >= a.rows; };
    bool any_bad = false;
#pragma unroll
    for (int i = 0; i < in_flight; ++i) lane_offsets[i] = skipped;
    if (team.lane() * in_flight < span) {
#pragma unroll
      for (int i = 0; i < in_flight; ++i) {
        if (first + i < team.range.end) lane_offsets[i] = core::read(a.bags.ids, first + i);
      }
#pragma unroll
      for (int i = 0; i < in_flight; ++i) {
        const int64_t id = lane_offsets[i];
        any_bad |= first + i < team.range.end && bad(id);
        lane_offsets[i] = bad(id) || id == a.bags.padding_idx ? skipped : id * a.table_stride;
      }
    }
    const unsigned reporters = __ballot_sync(full_mask, any_bad && team.records);
    if (reporters == 0 || __ffs(reporters) - 1 != static_cast<int>(threadIdx.x) % warp_size) return;
    int64_t index = first;
    while (!bad(core::read(a.bags.ids, index))) ++index;
    report(a.error, core::ErrorKind::token_id, core::read(a.bags.ids, index), index, a.rows);
  }

  __device__ int kept() const {
    int count = 0;
#pragma unroll
    for (int i = 0; i < in_flight; ++i) count += lane_offsets[i] != skipped;
    return count;
  }
};

/// The number of ids that a step of pool_rows() processes; divides a span.
POSEMBED_INLINE int ids_of_step(const Team& team) {
  return team.lanes * in_flight < span ? team.lanes * in_flight : static_cast<int>(span);
}

/// The length of the longest bag of the calling warp.
__device__ int64_t longest_bag(const Team& team) {
  const int64_t length = team.range.end - team.range.begin;
  return team.lanes == warp_size ? length : core::over_warp(length, core::Larger{});
}

/// Calls begin_step(done, offsets) for each step, and use(index, vector, kept) for each id of the
/// bag in order; `kept` is false for padding, bad ids, and indices beyond the bag. Loads a later
/// row as soon as one has been used.
template <typename T, int width, typename Begin, typename Use>
__device__ void pool_rows(const PoolArguments& a, const Team& team, Begin begin_step, Use use) {
  const int step = ids_of_step(team), first_lane = team.first_lane();
  const int64_t length = longest_bag(team);
  const T* table = static_cast<const T*>(a.table) + team.item.column;
  for (int64_t done = 0; done < length; done += step) {
    const int64_t begin = team.range.begin + done;
    const RowOffsets offsets(a, team, begin);
    begin_step(done, offsets);
    DeviceWords<T, width> vectors[in_flight];
    bool kept[in_flight];
    const auto read = [&](int round, int i) {
      const int64_t offset = __shfl_sync(full_mask, offsets.lane_offsets[i], first_lane + round);
      kept[i] = offset != RowOffsets::skipped && team.active;
      vectors[i] = {};
      if (kept[i]) vectors[i].read(table + offset);
    };
#pragma unroll
    for (int i = 0; i < in_flight; ++i) read(0, i);
    const auto use_row = [&](int round, int i) {
      Compute<T> values[width];
      vectors[i].load(values);
      use(begin + round * in_flight + i, values, kept[i]);
    };
    const int64_t left = length - done < step ? length - done : step;
    const int last = static_cast<int>(left - 1) / in_flight;
    for (int round = 0; round < last; ++round) {
#pragma unroll
      for (int i = 0; i < in_flight; ++i) {
        use_row(round, i);
        read(round + 1, i);
      }
    }
#pragma unroll
    for (int i = 0; i < in_flight; ++i) use_row(last, i);
  }
}

template <typename T, int width>
__device__ void write_row(const PoolArguments& a, const Item& item,
                          const Compute<T> (&values)[width]) {
  Vector<T, width> result;
#pragma unroll
  for (int i = 0; i < width; ++i) store(values[i], &result.values[i]);
  T* out = static_cast<T*>(a.out) + item.row * a.embedding_dim + item.column;
  core::write_vector<T, width>(result, out);
}

/// Divides by the number of rows that the team's lanes have read.
template <typename C, int width>
__device__ void divide_by_count(const Team& team, int64_t kept, C (&total)[width]) {
  for (int lanes = 1; lanes < team.lanes; lanes *= 2) {
    kept += __shfl_xor_sync(full_mask, kept, lanes);
  }
  if (kept <= 1) return;
#pragma unroll
  for (int i = 0; i < width; ++i) total[i] /= static_cast<C>(kept);
}

template <typename T, int width, bool weighted>
__global__ void __launch_bounds__(threads) add_kernel(PoolArguments a, WarpLayout layout) {
  using C = Compute<T>;
  const Team team = team_of_lane<width>(a, layout);
  const auto* weights = static_cast<const T*>(a.weights);
  C total[width] = {}, part[width] = {};
  int64_t kept_by_lane = 0;
  const auto end_span = [&] {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      total[i] += part[i];
      part[i] = 0;
    }
  };
  const auto begin_step = [&](int64_t done, const RowOffsets& offsets) {
    if (done % span == 0) end_span();
    kept_by_lane += offsets.kept();
  };
  const auto add = [&](int64_t index, const C(&values)[width], bool kept) {
    const C factor = weighted && kept ? load(weights[index]) : C(0);
#pragma unroll
    for (int i = 0; i < width; ++i) {  // zeros if not kept
      part[i] += weighted ? values[i] * factor : values[i];
    }
  };
  pool_rows<T, width>(a, team, begin_step, add);
  end_span();
  if (a.mode == Mode::mean) divide_by_count(team, kept_by_lane, total);
  if (team.active) write_row<T, width>(a, team.item, total);
}

template <typename T, int width>
__global__ void __launch_bounds__(threads) compare_kernel(PoolArguments a, WarpLayout layout) {
  using C = Compute<T>;
  const Team team = team_of_lane<width>(a, layout);
  C best[width] = {};
  int64_t best_index[width];
#pragma unroll
  for (int i = 0; i < width; ++i) best_index[i] = -1;
  const auto compare = [&](int64_t index, const C(&values)[width], bool kept) {
    if (!kept) return;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const bool greater = best_index[i] < 0 || values[i] > best[i] || values[i] != values[i];
      best[i] = greater ? values[i] : best[i];
      best_index[i] = greater ? index : best_index[i];
    }
  };
  pool_rows<T, width>(
      a, team, [](int64_t, const RowOffsets&) {}, compare);
  if (!team.active) return;
  write_row<T, width>(a, team.item, best);
  if (a.max_indices == nullptr) return;
  int64_t* max_indices = a.max_indices + team.item.row * a.embedding_dim + team.item.column;
#pragma unroll
  for (int i = 0; i < width; ++i) max_indices[i] = best_index[i];
}

template <typename T, int width>
void launch_pool(const PoolArguments& a, cudaStream_t stream) {
  WarpLayout layout{pieces_of(a.embedding_dim, width), 1};
  while (layout.lanes < warp_size && layout.lanes * width < a.embedding_dim) layout.lanes *= 2;
  auto kernel = a.weights == nullptr ? add_kernel<T, width, false> : add_kernel<T, width, true>;
  if (a.mode == Mode::max) kernel = compare_kernel<T, width>;
  const int64_t lanes = a.bags.bags * layout.pieces * layout.lanes;
  core::launch(kernel, divide_up(lanes, threads), threads, stream, a, layout);
}

// ---- backward ----

// Wrong offsets, which the forward pass has recorded, may assign an id to any bag or none.
__global__ void __launch_bounds__(threads) find_kernel(FindArguments a) {
  const int64_t index = int64_t{blockIdx.x} * threads + threadIdx.x;
  if (index >= a.bags.count) return;
  const int64_t bag = bag_of(a.bags, index);
  a.out[index] = static_cast<uint32_t>(bag > 0 ? bag : 0);
}

template <typename T, int width>
__global__ void __launch_bounds__(threads) spread_kernel(SpreadArguments a, int64_t pieces) {
  const Item item = item_of_lane<width>(pieces, 1);
  if (item.row >= a.bags.count || item.column >= a.embedding_dim) return;
  const int64_t bag = bag_of(a.bags, item.row);
  Vector<T, width> values = {};
  if (bag >= 0) {
    const int64_t at = bag * a.embedding_dim + item.column;
    values = read_vector<T, width>(static_cast<const T*>(a.gradient) + at);
#pragma unroll
    for (int i = 0; i < width; ++i) {
      if (a.max_indices[at + i] != item.row) values.values[i] = T{};
    }
  }
  T* out = static_cast<T*>(a.out) + item.row * a.embedding_dim + item.column;
  core::write_vector<T, width>(values, out);
}

template <typename T, int width>
void launch_spread(const SpreadArguments& a, cudaStream_t stream) {
  const int64_t pieces = pieces_of(a.embedding_dim, width);
  core::launch(spread_kernel<T, width>, blocks_for(a.bags.count * pieces), threads, stream, a,
               pieces);
}

// ---- dot ----

template <typename T, int width>
__global__ void __launch_bounds__(threads) dot_kernel(DotArguments a) {
  using C = Compute<T>;
  __shared__ C parts[threads];
  const int64_t index = int64_t{blockIdx.x} * warps + threadIdx.x / warp_size;
  const int64_t id = index < a.bags.count ? read(a.bags.ids, index) : -1;
  const int64_t bag = index < a.bags.count ? bag_of(a.bags, index) : -1;
  C sum = 0;
  if (bag >= 0 && id >= 0 && id < a.rows && id != a.bags.padding_idx) {
    const T* gradient = static_cast<const T*>(a.gradient) + bag * a.embedding_dim;
    const T* row = static_cast<const T*>(a.table) + id * a.table_stride;
    for (int64_t column = int64_t{threadIdx.x} % warp_size * width; column < a.embedding_dim;
         column += warp_size * width) {
      const auto left = read_vector<T, width>(gradient + column);
      const auto right = read_vector<T, width>(row + column);
#pragma unroll
      for (int i = 0; i < width; ++i) sum += load(left.values[i]) * load(right.values[i]);
    }
  }
  parts[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x % warp_size != 0 || index >= a.bags.count) return;
  for (int lane = 1; lane < warp_size; ++lane) sum += parts[threadIdx.x + lane];
  store(sum, static_cast<T*>(a.out) + index);
}

template <typename T, int width>
void launch_dot(const DotArguments& a, cudaStream_t stream) {
  core::launch(dot_kernel<T, width>, blocks_for(a.bags.count), threads, stream, a);
}

}  // namespace

const char* pool_cuda(const PoolArguments& arguments, core::CudaStream stream) {
  const int64_t dim = arguments.embedding_dim;
  if (arguments.bags.bags == 0 || dim == 0) return nullptr;
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    core::visit_width<T, min_vector_bytes>(
        std::min(core::width_of<T>(arguments.table, dim, arguments.table_stride),
                 core::width_of<T>(arguments.out, dim, dim)),
        [&](auto width) { launch_pool<T, width>(arguments, stream); });
  });
  return core::launch_error();
}

const char* find_bags_cuda(const FindArguments& arguments, core::CudaStream stream) {
  return core::checked_launch(find_kernel,
                              static_cast<unsigned>(divide_up(arguments.bags.count, threads)),
                              threads, 0, stream, arguments);
}

const char* spread_cuda(const SpreadArguments& arguments, core::CudaStream stream) {
  const int64_t dim = arguments.embedding_dim;
  if (arguments.bags.count == 0 || dim == 0) return nullptr;
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    core::visit_width<T, min_vector_bytes>(
        std::min(core::width_of<T>(arguments.gradient, dim, dim),
                 core::width_of<T>(arguments.out, dim, dim)),
        [&](auto width) { launch_spread<T, width>(arguments, stream); });
  });
  return core::launch_error();
}

const char* dot_cuda(const DotArguments& arguments, core::CudaStream stream) {
  const int64_t dim = arguments.embedding_dim;
  if (arguments.bags.count == 0) return nullptr;
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    core::visit_width<T, min_vector_bytes>(
        std::min(core::width_of<T>(arguments.gradient, dim, dim),
                 core::width_of<T>(arguments.table, dim, arguments.table_stride)),
        [&](auto width) { launch_dot<T, width>(arguments, stream); });
  });
  return core::launch_error();
}

}  // namespace posembed::bag
