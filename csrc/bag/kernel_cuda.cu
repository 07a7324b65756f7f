// A warp pools 16 bytes per lane of a bag's rows in the CPU kernel's order, so results have the
// same bits. In the backward pass a warp or a thread processes a place and finds its bag by binary
// search, so that long bags cost no more than short ones.
#include "bag/kernel.h"
#include "core/device_item.h"
#include "core/device_store.h"
#include "core/device_vector.h"

namespace posembed::bag {
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
using core::warps;

// The division of rows among lanes.
struct WarpLayout {
  int64_t of_row;  // pieces of a row, each for one warp
  unsigned lanes;  // of a row: a power of two; fewer than a warp's for narrow rows
};

int64_t pieces_of(int64_t embedding_dim, int width) {
  return divide_up(embedding_dim, int64_t{warp_size} * width);
}

template <typename T, int width>
__device__ Vector<T, width> read_vector(const T* from) {
  return *reinterpret_cast<const Vector<T, width>*>(from);
}

// ---- pool ----

// The places of a bag. If its offsets are wrong, the first wrong one is recorded and the bag is
// empty.
__device__ Range checked_range(const PoolArguments& a, int64_t bag, bool records) {
  const Bags& bags = a.bags;
  const Range range = range_of(bags, bag);
  const bool begins =
      range.begin >= 0 && range.begin <= bags.count && (bag > 0 || range.begin == 0);
  const bool ends = range.begin <= range.end && range.end <= bags.count &&
                    (bag + 1 < bags.bags || range.end == bags.count);
  if (begins && ends) return range;
  if (records) {
    record_error(a.error, core::ErrorKind::bag_offset, begins ? range.end : range.begin,
                 begins ? bag + 1 : bag, bags.count);
  }
  return {0, 0};
}

// The row of a place's id; nullptr if the place is left out.
template <typename T>
__device__ const T* row_of(const PoolArguments& a, int64_t id, int64_t place, bool records) {
  if (id < 0 || id >= a.rows) {
    if (records) record_error(a.error, core::ErrorKind::token_id, id, place, a.rows);
    return nullptr;
  }
  if (id == a.bags.padding_idx) return nullptr;
  return static_cast<const T*>(a.table) + id * a.table_stride;
}

// A lane's vectors of several rows of a bag, whose loads are all issued before the first is used.
template <typename T, int width>
struct RowsInFlight {
  static constexpr int count = 8;

  const T* row[count];  // nullptr: left out
  Vector<T, width> vector[count];

  __device__ void read(const PoolArguments& a, int64_t first, int64_t last, int64_t column,
                       bool records) {
    int64_t ids[count];
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if (first + i < last) ids[i] = core::read(a.bags.ids, first + i);
    }
#pragma unroll
    for (int i = 0; i < count; ++i) {
      row[i] = first + i < last ? row_of<T>(a, ids[i], first + i, records) : nullptr;
    }
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if (row[i] != nullptr) vector[i] = read_vector<T, width>(row[i] + column);
    }
  }
};

// The bag and the first column of a lane: a warp takes several bags of narrow rows.
template <int width>
__device__ Item bag_of_lane(const WarpLayout& layout) {
  if (layout.lanes == warp_size) return item_of_lane<width>(layout.of_row, 1);
  const int64_t thread = int64_t{blockIdx.x} * threads + threadIdx.x;
  return {thread / layout.lanes, thread % layout.lanes * width};
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

template <typename T, int width>
__global__ void __launch_bounds__(threads) add_kernel(PoolArguments a, WarpLayout layout) {
  using C = Compute<T>;
  const Item item = bag_of_lane<width>(layout);
  if (item.row >= a.bags.bags || item.column >= a.embedding_dim) return;
  const bool records = item.column == 0;
  const Range range = checked_range(a, item.row, records);
  const auto* weights = static_cast<const T*>(a.weights);
  C total[width] = {};
  int64_t kept = 0;
  for (int64_t first = range.begin; first < range.end; first += span) {
    const int64_t last = first + span < range.end ? first + span : range.end;
    C part[width] = {};
    for (int64_t place = first; place < last; place += RowsInFlight<T, width>::count) {
      RowsInFlight<T, width> rows;
      rows.read(a, place, last, item.column, records);
#pragma unroll
      for (int r = 0; r < rows.count; ++r) {
        if (rows.row[r] == nullptr) continue;
        const C factor = weights != nullptr ? load(weights[place + r]) : C(1);
        C values[width];
        core::load_all(rows.vector[r].values, values);
#pragma unroll
        for (int i = 0; i < width; ++i) part[i] += values[i] * factor;
        ++kept;
      }
    }
#pragma unroll
    for (int i = 0; i < width; ++i) total[i] += part[i];
  }
  const C divisor = a.mode == Mode::mean && kept > 1 ? static_cast<C>(kept) : C(1);
#pragma unroll
  for (int i = 0; i < width; ++i) total[i] /= divisor;
  write_row<T, width>(a, item, total);
}

template <typename T, int width>
__global__ void __launch_bounds__(threads) compare_kernel(PoolArguments a, WarpLayout layout) {
  using C = Compute<T>;
  const Item item = bag_of_lane<width>(layout);
  if (item.row >= a.bags.bags || item.column >= a.embedding_dim) return;
  const bool records = item.column == 0;
  const Range range = checked_range(a, item.row, records);
  C best[width] = {};
  int64_t at[width];
#pragma unroll
  for (int i = 0; i < width; ++i) at[i] = -1;
  for (int64_t place = range.begin; place < range.end; place += RowsInFlight<T, width>::count) {
    RowsInFlight<T, width> rows;
    rows.read(a, place, range.end, item.column, records);
#pragma unroll
    for (int r = 0; r < rows.count; ++r) {
      if (rows.row[r] == nullptr) continue;
#pragma unroll
      for (int i = 0; i < width; ++i) {
        const C value = load(rows.vector[r].values[i]);
        const bool greater = at[i] < 0 || value > best[i] || value != value;
        best[i] = greater ? value : best[i];
        at[i] = greater ? place + r : at[i];
      }
    }
  }
  write_row<T, width>(a, item, best);
  if (a.places == nullptr) return;
  int64_t* places = a.places + item.row * a.embedding_dim + item.column;
#pragma unroll
  for (int i = 0; i < width; ++i) places[i] = at[i];
}

template <typename T, int width>
void launch_pool(const PoolArguments& a, cudaStream_t stream) {
  WarpLayout layout{pieces_of(a.embedding_dim, width), 1};
  while (layout.lanes < warp_size && layout.lanes * width < a.embedding_dim) layout.lanes *= 2;
  const auto kernel = a.mode == Mode::max ? compare_kernel<T, width> : add_kernel<T, width>;
  const int64_t lanes = a.bags.bags * layout.of_row * layout.lanes;
  core::launch(kernel, divide_up(lanes, threads), threads, stream, a, layout);
}

// ---- backward ----

// Wrong offsets, which the forward pass has recorded, may assign a place to any bag or none.
__global__ void __launch_bounds__(threads) find_kernel(FindArguments a) {
  const int64_t place = int64_t{blockIdx.x} * threads + threadIdx.x;
  if (place >= a.bags.count) return;
  const int64_t bag = bag_of(a.bags, place);
  a.out[place] = static_cast<uint32_t>(bag > 0 ? bag : 0);
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
      if (a.places[at + i] != item.row) values.values[i] = T{};
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
  const int64_t place = int64_t{blockIdx.x} * warps + threadIdx.x / warp_size;
  const int64_t id = place < a.bags.count ? read(a.bags.ids, place) : -1;
  const int64_t bag = place < a.bags.count ? bag_of(a.bags, place) : -1;
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
  if (threadIdx.x % warp_size != 0 || place >= a.bags.count) return;
  for (int lane = 1; lane < warp_size; ++lane) sum += parts[threadIdx.x + lane];
  store(sum, static_cast<T*>(a.out) + place);
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
    const bool vectors = core::vectorizable<T>(arguments.table, dim, arguments.table_stride) &&
                         core::vectorizable<T>(arguments.out, dim, dim);
    if (vectors) {
      launch_pool<T, core::vector_width<T>>(arguments, stream);
    } else {
      launch_pool<T, 1>(arguments, stream);
    }
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
    const bool vectors = core::vectorizable<T>(arguments.gradient, dim, dim) &&
                         core::vectorizable<T>(arguments.out, dim, dim);
    if (vectors) {
      launch_spread<T, core::vector_width<T>>(arguments, stream);
    } else {
      launch_spread<T, 1>(arguments, stream);
    }
  });
  return core::launch_error();
}

const char* dot_cuda(const DotArguments& arguments, core::CudaStream stream) {
  const int64_t dim = arguments.embedding_dim;
  if (arguments.bags.count == 0) return nullptr;
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool vectors = core::vectorizable<T>(arguments.gradient, dim, dim) &&
                         core::vectorizable<T>(arguments.table, dim, arguments.table_stride);
    if (vectors) {
      launch_dot<T, core::vector_width<T>>(arguments, stream);
    } else {
      launch_dot<T, 1>(arguments, stream);
    }
  });
  return core::launch_error();
}

}  // namespace posembed::bag
